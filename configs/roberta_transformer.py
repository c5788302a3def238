"""Masked language models, the plain transformer: every layer trained.

    python -m reservoir.train --config=configs/roberta_transformer.py --config.data.source=files:DIR

Reproduces: Figure 7 (12 layers; validation perplexity and its AUCC) and the pretraining for Figure 2.
Hardware: the paper uses 32 GPUs. This recipe, 125k updates of 1M tokens, is fairseq's; we have not run this size.
`--config=configs/roberta_transformer.py:laptop` has 6 layers: half an hour on two CPU cores, estimated from its FLOPs.
Data: text files train.txt, valid.txt, test.txt (or .gz), one document per line, in data/pretraining
(`:laptop`: data/reviews). To use other files, set --config.data.source=files:DIR and
--config.data.splits.train=PATTERNS.
RoBERTa (Liu et al., 2019) used five corpora and GPT-2's subwords; we learn the subwords from the training text.
`--config=configs/roberta_transformer.py:tiny` trains on the Python manual (no download): a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import masked


def get_config(argument: str = "") -> ConfigDict:
    return masked.choose(masked.roberta("none"), argument)
