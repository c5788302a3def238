"""MNIST digits: one or more softmax layers, trained from the explicit solution (warm) or from random values (cold).

    python -m explicit_opt.train --config=configs/mnist_explicit.py --config.model.layers=2 --config.start=warm

Reproduces: Figure 2 (start = cold, explicit, warm; one and two layers). The paper names no optimizer. Of the
optimizers that we tried, Adam came closest to the printed numbers; see explicit_opt/DETAILS.md.
Hardware: minutes on two CPU cores.
Data: the four IDX files of MNIST, gzipped or not, in data/mnist. Another folder: --config.data.source=files:DIR.
`--config=configs/mnist_explicit.py:tiny` uses the digits of scikit-learn (no download): seconds on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import explicit, training


def get_config(argument: str = "") -> ConfigDict:
    return training.choose(explicit.mnist(), argument, tiny=explicit.tiny_digits)
