"""GPT on enwik8 (the first 10^8 bytes of Wikipedia).

    python -m gmlp_lm.train --config=configs/enwik8_gpt.py

Reproduces: Table 3, case 1 (GPT-base).
Recipes: `:paper` (default), `:code` (the authors' program), `:fixed` (ours: models of equal size, within 0.5 %).
Hardware: one accelerator. `:laptop` (or `:fixed,laptop`) is a smaller size for two CPU cores.
Data: enwik8, enwik8.gz or enwik8.zip in data/enwik8; 90 % of the bytes to train, then 5 % to validate and 5 % to test.
Another file: --config.data.source=files:DIR --config.data.file=NAME.
`--config=configs/enwik8_gpt.py:tiny` trains on the Python manual (no download): seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import language


def get_config(argument: str = "") -> ConfigDict:
    return language.choose("gpt", "enwik8", argument)
