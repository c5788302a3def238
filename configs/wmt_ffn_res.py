"""WMT'16 English-German, FFN reservoirs: feed-forward layers without attention, frozen.

    python -m reservoir.train --config=configs/wmt_ffn_res.py

Reproduces: Table 2 (12 encoder layers; 16, 24, 32 by --config.model.encoder_layers=N).
Hardware: 8 GPUs, as in the paper (300k updates of 65k tokens); not run here.
Data: `tfds:wmt16_translate/de-en` prepared by `tfds build wmt16_translate/de-en` (validation newstest2015, test
newstest2016), or text files by --config.data.source=files:DIR. The paper validates on newstest2013 and tests on
newstest2014, pre-tokenized; scores here are sacrebleu on plain text.
`--config=configs/wmt_ffn_res.py:tiny` is a small model on embedded data: about two minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import translation


def get_config(argument: str = "") -> ConfigDict:
    return translation.choose(translation.wmt("ffn"), argument)
