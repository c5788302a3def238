"""gMLP on WikiText-103 as bytes.

    python -m gmlp_lm.train --config=configs/wikitext103_gmlp.py

Reproduces: Table 3, case 8 (GPT-base + gMLP).
Recipes: `:paper` (default), `:code` (the authors' program), `:fixed` (ours: models of equal size, within 0.5 %).
Hardware: one accelerator. `:laptop` (or `:fixed,laptop`) is a smaller size for two CPU cores.
Data: wiki.{train,valid,test}.tokens (or .raw) or {train,valid,test}.txt, plain, .gz or .zip, in data/wikitext103. Other
files: --config.data.source=files:DIR, and --config.data.splits.SPLIT=NAME for the splits train, valid and test.
`--config=configs/wikitext103_gmlp.py:tiny` trains on the Python manual (no download): seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import language


def get_config(argument: str = "") -> ConfigDict:
    return language.choose("gmlp", "wikitext103", argument)
