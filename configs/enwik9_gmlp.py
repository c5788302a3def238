"""gMLP on enwik9 (the first 10^9 bytes of Wikipedia).

    python -m gmlp_lm.train --config=configs/enwik9_gmlp.py

Reproduces: Table 3, case 6 (GPT-base + gMLP).
Recipes: `:paper` (default), `:code` (the authors' program), `:fixed` (ours: models of equal size, within 0.5 %).
Hardware: one accelerator. `:laptop` (or `:fixed,laptop`) is a smaller size for two CPU cores.
Data: enwik9, enwik9.gz or enwik9.zip in data/enwik9; 90 % of the bytes to train, then 5 % to validate and 5 % to test.
`:code` uses the first 10^8 bytes only.
Another file: --config.data.source=files:DIR --config.data.file=NAME.
`--config=configs/enwik9_gmlp.py:tiny` trains on the Python manual (no download): seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import language


def get_config(argument: str = "") -> ConfigDict:
    return language.choose("gmlp", "enwik9", argument)
