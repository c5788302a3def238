"""IWSLT'14 German-English, FFN reservoirs: feed-forward layers without attention, frozen.

    python -m reservoir.train --config=configs/iwslt_ffn_res.py

Reproduces: Table 1 with 6 encoder layers. --config.model.encoder_layers=8|10|12 gives the other depths;
--config.model.decoder_layers=6 gives Table 5.
Hardware: one GPU; results/reservoir/README.md has runs of 4,000 steps at this size on an NVIDIA H100, on Tatoeba.
Data: text files {train,valid,test}.{de,en}[.gz] in data/iwslt14_de_en. Another folder: --config.data.source=files:DIR.
`:laptop` has width 256 and trains for 2,000 steps on Multi30k (data/multi30k_de_en), for two CPU cores.
`--config=configs/iwslt_ffn_res.py:tiny` trains on generated sentences (no download): two minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import translation


def get_config(argument: str = "") -> ConfigDict:
    return translation.choose(translation.iwslt("ffn"), argument)
