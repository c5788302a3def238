"""Masked language models, FFN reservoirs: feed-forward layers without attention, frozen.

    python -m reservoir.train --config=configs/roberta_ffn_res.py --config.data.source=files:DIR

Reproduces: Figure 7 (12 layers, 4 of them frozen; validation perplexity and its AUCC); what Figure 2 fine-tunes.
Hardware: 32 GPUs, as in the paper (125k updates of 1M tokens); not run here. `:laptop` is a model of 6 layers for
two CPU cores (about half an hour by its operations, not run to the end); see reservoir/README.md.
Data: text files train.txt, valid.txt, test.txt (or .gz), one document a line, in data/pretraining (`:laptop`:
data/reviews), or elsewhere by --config.data.source=files:DIR and --config.data.splits.train=PATTERNS. The paper's are
BookCorpus, Wikipedia and three more, in the pieces of GPT-2; ours are made from the text itself.
`--config=configs/roberta_ffn_res.py:tiny` is a small model on embedded text: about a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import masked


def get_config(argument: str = "") -> ConfigDict:
    return masked.choose(masked.roberta("ffn"), argument)
