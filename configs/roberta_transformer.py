"""Masked language models, the plain transformer: every layer trained.

    python -m reservoir.train --config=configs/roberta_transformer.py --config.data.source=files:DIR

Reproduces: Figure 7 (12 layers; validation perplexity and its AUCC); the pretraining for Figure 2.
Hardware: 32 GPUs, as in the paper (125k updates of 1M tokens); not run here. `:laptop` is a model of 6 layers for
two CPU cores (half an hour by its FLOPs, not run to the end); see reservoir/README.md.
Data: text files train.txt, valid.txt, test.txt (or .gz), one document a line, in data/pretraining (`:laptop`:
data/reviews), or elsewhere by --config.data.source=files:DIR and --config.data.splits.train=PATTERNS. The paper's are
BookCorpus, Wikipedia and three more, in GPT-2's pieces; ours are learned from the text itself.
`--config=configs/roberta_transformer.py:tiny` is a small model on embedded text: about a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import masked


def get_config(argument: str = "") -> ConfigDict:
    return masked.choose(masked.roberta("none"), argument)
