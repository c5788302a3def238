"""IWSLT'14 German-English, transformer reservoirs: whole layers frozen.

    python -m reservoir.train --config=configs/iwslt_t_res.py

Reproduces: Table 1 (6 encoder layers; 8, 10, 12 by --config.model.encoder_layers=N), with
--config.model.decoder_layers=6 Table 5.
Hardware: 1 GPU; not run here.
Data: text files {train,valid,test}.{de,en}[.gz] in data/iwslt14_de_en, or elsewhere by --config.data.source=files:DIR.
`--config=configs/iwslt_t_res.py:tiny` is a small model on embedded data: about two minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import translation


def get_config(argument: str = "") -> ConfigDict:
    return translation.choose(translation.iwslt("transformer"), argument)
