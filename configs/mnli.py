"""MultiNLI-matched, whether one sentence follows from another, fine-tuned from a masked language model.

    python -m reservoir.finetune --config=configs/mnli.py --config.pretrained=runs/roberta_ffn_res

Reproduces: Figure 2, right. Reservoirs stay frozen; `--config.reservoirs=tune` trains them. The paper's
control starts from a model without reservoirs: `--config.reservoirs=freeze_now --config.freeze_now=4`.
Hardware: one accelerator; we have not run this size. `--config=configs/mnli.py:laptop` is for two CPU cores.
Data: `tfds:glue/mnli`, or files {train,validation_matched}.jsonl (or .csv, or .gz) with the fields premise,
hypothesis and label, with --config.data.source=files:DIR. Other split names: --config.data.splits.valid=NAME and
--config.data.splits.test=NAME.
`--config=configs/mnli.py:tiny` classifies pairs of paragraphs (no download): a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import finetuning


def get_config(argument: str = "") -> ConfigDict:
    return finetuning.choose(finetuning.mnli(), argument)
