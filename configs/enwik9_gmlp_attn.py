"""gMLP with a tiny attention on enwik9 (the first 10^9 bytes of Wikipedia).

    python -m gmlp_lm.train --config=configs/enwik9_gmlp_attn.py

Reproduces: Table 3, case 10 (GPT-base + gMLP + attn).
`:paper` (the default) follows the text, `:code` the authors' program, `:fixed` compares at equal parameters.
Hardware: one accelerator; gmlp_lm/README.md has sizes for two CPU cores.
Data: the file enwik9, enwik9.gz or enwik9.zip in data/enwik9, cut 90/5/5 by position; elsewhere by
--config.data.source=files:DIR and --config.data.file=NAME.
`--config=configs/enwik9_gmlp_attn.py:tiny` is a small model on embedded text: seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import language


def get_config(argument: str = "") -> ConfigDict:
    return language.choose("gmlp_attn", "enwik9", argument)
