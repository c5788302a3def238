"""gMLP with a tiny attention on WikiText-2 as bytes.

    python -m gmlp_lm.train --config=configs/wikitext2_gmlp_attn.py

Reproduces: Table 3, case 11 (GPT-base + gMLP + attn).
Recipes, appended to the file name: `:paper` (default) follows the paper's text, `:code` the authors' program. `:fixed`
is ours: GPT, gMLP and gMLP with attention have the same number of parameters within 0.5 %.
Hardware: one accelerator. `:laptop` (or `:fixed,laptop`) is a smaller size for two CPU cores.
Data: wiki.{train,valid,test}.tokens (or .raw) or {train,valid,test}.txt, plain, .gz or .zip, in data/wikitext2. Other
files: --config.data.source=files:DIR, and --config.data.splits.SPLIT=NAME for the splits train, valid and test.
`--config=configs/wikitext2_gmlp_attn.py:tiny` trains a small model on the Python manual (embedded:python, no download):
seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import language


def get_config(argument: str = "") -> ConfigDict:
    return language.choose("gmlp_attn", "wikitext2", argument)
