"""SST-2, the sentiment of a sentence, fine-tuned from a masked language model.

    python -m reservoir.finetune --config=configs/sst2.py --config.pretrained=runs/roberta_ffn_res

Reproduces: Figure 2, left. Reservoirs stay frozen; `--config.reservoirs=tune` trains them. The paper's
control starts from a model without reservoirs: `--config.reservoirs=freeze_now --config.freeze_now=4`.
Hardware: one accelerator; we have not run this size. `--config=configs/sst2.py:laptop` is for two CPU cores.
Data: `tfds:glue/sst2`, or files {train,validation}.jsonl (or .csv, or .gz) with the fields text (or sentence) and
label, with --config.data.source=files:DIR. The test split is `validation`, because GLUE hides the labels of `test`.
If your files have a labelled test split: --config.data.splits.test=test.
`--config=configs/sst2.py:tiny` classifies paragraphs of the Python manual (no download): a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import finetuning


def get_config(argument: str = "") -> ConfigDict:
    return finetuning.choose(finetuning.sst2(), argument)
