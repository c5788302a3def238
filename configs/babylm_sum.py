"""BabyLM (10M words), sum of the previous tokens: explicit, warm and cold starts of a softmax layer.

    python -m explicit_opt.train --config=configs/babylm_sum.py --config.model.context=4 --config.start=warm

Reproduces: Table 1 and Figure 3 for the sum (Sum). --config.model.context=1|2|4 (the number of
previous tokens) and --config.start=cold|explicit|warm choose a model.
Hardware: one accelerator, or a few hours on CPUs for each start. The explicit solution alone takes seconds.
Data: text files train/*.txt, dev/*.txt, test/*.txt of BabyLM's 10M track in data/babylm. To use other files,
set --config.data.source=files:DIR and --config.data.splits.train=PATTERNS.
`--config=configs/babylm_sum.py:tiny` trains on the Python manual (no download): a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import explicit, training


def get_config(argument: str = "") -> ConfigDict:
    return training.choose(explicit.babylm("sum"), argument, tiny=explicit.tiny_text)
