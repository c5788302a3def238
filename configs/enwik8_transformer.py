"""A byte language model of enwik8 without reservoirs: 48 layers.

    python -m reservoir.train --config=configs/enwik8_transformer.py

Reproduces: Figure 1 (right), one point. --config.model.layers=64 gives another depth.
Hardware: one accelerator of 16 GB or more.
Data: enwik8 (plain, .gz or .zip) in data/enwik8; another file: --config.data.source=files:DIR --config.data.file=NAME.
`--config=configs/enwik8_transformer.py:laptop` has 8 layers of half the width, for two CPU cores.
`--config=configs/enwik8_transformer.py:tiny` trains on the Python manual (no download): a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import bytelevel


def get_config(argument: str = "") -> ConfigDict:
    return bytelevel.choose(bytelevel.enwik8("none"), argument)
