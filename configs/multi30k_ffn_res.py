"""Multi30k German-English (29k image captions), FFN reservoirs: feed-forward layers without attention, frozen.

    python -m reservoir.train --config=configs/multi30k_ffn_res.py

Reproduces: nothing in the paper. A complete small task for a laptop (6 encoder layers, 2 decoder layers, width 256).
Hardware: two CPU cores; results/observations.md has time and score of a run of 2,000 steps.
Data: text files {train,valid,test2016}.{de,en}[.gz] in data/multi30k_de_en, or --config.data.source=files:DIR.
`--config=configs/multi30k_ffn_res.py:laptop` trains for 2,000 steps, with a cosine schedule.
`--config=configs/multi30k_ffn_res.py:tiny` trains on generated sentences (no download): two minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import translation


def get_config(argument: str = "") -> ConfigDict:
    return translation.choose(translation.multi30k("ffn"), argument)
