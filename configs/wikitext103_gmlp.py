"""gMLP on WikiText-103 as bytes.

    python -m gmlp_lm.train --config=configs/wikitext103_gmlp.py

Reproduces: Table 3, case 8 (GPT-base + gMLP).
`:paper` (the default) follows the text, `:code` the authors' program, `:fixed` compares at equal parameters.
Hardware: one accelerator; gmlp_lm/README.md has sizes for two CPU cores.
Data: wiki.{train,valid,test}.tokens, plain or .gz, in data/wikitext103; elsewhere by --config.data.source=files:DIR and
--config.data.splits.train=NAME (valid, test).
`--config=configs/wikitext103_gmlp.py:tiny` is a small model on embedded text: seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import language


def get_config(argument: str = "") -> ConfigDict:
    return language.choose("gmlp", "wikitext103", argument)
