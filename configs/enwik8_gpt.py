"""GPT on enwik8 (the first 10^8 bytes of Wikipedia).

    python -m gmlp_lm.train --config=configs/enwik8_gpt.py

Reproduces: Table 3, case 1 (GPT-base).
`:paper` (the default) follows the text, `:code` the authors' program, `:fixed` compares at equal parameters.
Hardware: one accelerator; gmlp_lm/README.md has sizes for two CPU cores.
Data: the file enwik8, enwik8.gz or enwik8.zip in data/enwik8, cut 90/5/5 by position; elsewhere by
--config.data.source=files:DIR and --config.data.file=NAME.
`--config=configs/enwik8_gpt.py:tiny` is a small model on embedded text: seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import language


def get_config(argument: str = "") -> ConfigDict:
    return language.choose("gpt", "enwik8", argument)
