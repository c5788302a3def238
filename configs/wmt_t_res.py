"""WMT'16 English-German, transformer reservoirs: whole layers frozen.

    python -m reservoir.train --config=configs/wmt_t_res.py

Reproduces: Table 2 with 12 encoder layers. --config.model.encoder_layers=16|24|32 gives the other depths.
Hardware: 8 GPUs, as in the paper (300k updates of 65k tokens); we have not run this size.
Data: `tfds:wmt16_translate/de-en` prepared by `tfds build wmt16_translate/de-en` (validation newstest2015, test
newstest2016), or text files {train,validation,test}.{en,de}[.gz] with --config.data.source=files:DIR. The paper uses
newstest2013 and newstest2014, pre-processed as by Ott et al. (2018), who compute BLEU on tokenized text; ours is
sacrebleu on plain text.
`:laptop` has width 256 and trains for 2,000 steps on Multi30k (data/multi30k_de_en), for two CPU cores.
`--config=configs/wmt_t_res.py:tiny` trains on generated sentences (no download): two minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import translation


def get_config(argument: str = "") -> ConfigDict:
    return translation.choose(translation.wmt("transformer"), argument)
