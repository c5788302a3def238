"""MultiNLI-matched, whether one sentence follows from another, fine-tuned from a masked language model.

    python -m reservoir.finetune --config=configs/mnli.py --config.pretrained=runs/roberta_ffn_res

Reproduces: Figure 2, right. Frozen layers stay frozen; `--config.reservoirs=tune` trains them too, and
`--config.reservoirs=freeze_now --config.freeze_now=4`, for a plain run, is the paper's control.
Hardware: one accelerator; not run here. `:laptop` is for a small model on two CPU cores.
Data: `tfds:glue/mnli`, or files {train,validation_matched}.jsonl (or .csv, or .gz) with the fields premise,
hypothesis and label, by --config.data.source=files:DIR; other names by --config.data.splits.valid=NAME (test).
`--config=configs/mnli.py:tiny` classifies pairs of paragraphs of embedded text: a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import finetuning


def get_config(argument: str = "") -> ConfigDict:
    return finetuning.choose(finetuning.mnli(), argument)
