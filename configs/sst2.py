"""SST-2, the sentiment of a sentence, fine-tuned from a masked language model.

    python -m reservoir.finetune --config=configs/sst2.py --config.pretrained=runs/roberta_ffn_res

Reproduces: Figure 2, left. Frozen layers stay frozen; `--config.reservoirs=tune` trains them too, and
`--config.reservoirs=freeze_now --config.freeze_now=4`, for a plain run, is the paper's control.
Hardware: one accelerator; not run here. `:laptop` is for a small model on two CPU cores.
Data: `tfds:glue/sst2`, or files {train,validation}.jsonl (or .csv, or .gz) with the fields text (or sentence) and
label, by --config.data.source=files:DIR; `--config.data.splits.test=test` where there is a labelled test.
`--config=configs/sst2.py:tiny` classifies paragraphs of embedded text: a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import finetuning


def get_config(argument: str = "") -> ConfigDict:
    return finetuning.choose(finetuning.sst2(), argument)
