"""Solves the classification head by logistic regression on the cached features of the frozen encoder.

Logistic regression is convex, so its solution for given features does not depend on an optimizer or a seed. The inverse
penalty is chosen on the split `eval.select`: "valid", or "test" as in the authors' program.

Shape letters of this module: E examples, M inputs of the head (twice the width), C classes.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from common import variables
from common.atomic import write_atomic
from common.data.cache import fingerprint
from common.errors import check
from common.model.transformer import compute_dtype
from common.runtime.processes import all_reduce_max, is_main
from common.sharding import place
from common.train.evaluate import PerExample
from common.train.task import NO_PRETRAINED_WEIGHTS, Batch, ModelState, PretrainedWeights
from common.train.workdir import commit
from common.variables import AbstractModel, Params
from perception.model import PooledClassifier
from perception.task import TextClassification
from perception.weighted_f1 import score

INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Candidate inverse penalties (scikit-learn's C) for standardised features."""

KERNEL, BIAS = "head/kernel", "head/bias"

UNSEEN = -100.0
"""Bias of a class without training examples: the probability of the class is almost 0. If a text may have several
classes, a class that every training example has gets the bias -UNSEEN."""


class Solution(NamedTuple):
    """A solved head.

    Attributes:
      kernel_MC, bias_C: float32 parameters of the head, for features that are not standardised.
      inverse_penalty: the chosen inverse penalty.
      f1: weighted F1 in percent on the examples on which the penalty was chosen.
    """

    kernel_MC: np.ndarray
    bias_C: np.ndarray
    inverse_penalty: float
    f1: float


def solve(
    train: tuple[np.ndarray, np.ndarray],
    valid: tuple[np.ndarray, np.ndarray],
    classes: int,
    weights: np.ndarray | None = None,
) -> Solution:
    """Fits multinomial logistic regression with the inverse penalty that has the best weighted F1 on `valid`.

    If examples may have several classes, one logistic regression is fitted for each class, all with the same penalty.

    Args:
      train, valid: features (E, M) and labels (E,), or labels (E, C) for several classes per example.
      weights: weights of the training labels in the loss, with the shape of the labels; None for equal weights.

    Raises:
      UserError: all training examples have the same label, or the same set of classes.
    """
    from sklearn.linear_model import LogisticRegression

    (train_EM, labels), (valid_EM, wanted) = train, valid
    check(
        len(np.unique(labels, axis=0)) > 1,
        f"all training examples ({len(labels):,}) have the same label or set of labels: add examples with another"
        " label, or set --config.data.label to another field",
    )
    mean_M, deviation_M = train_EM.mean(0, np.float64), train_EM.std(0, dtype=np.float64)
    scale_M = np.where(deviation_M > 0, deviation_M, 1.0)
    rows_EM = (train_EM - mean_M) / scale_M
    # Start each fit at the solution for the previous penalty.
    new = partial(LogisticRegression, tol=1e-6, max_iter=10_000, warm_start=True)
    model, each = new(), [new() for _ in range(classes)]
    found: Solution | None = None
    for penalty in INVERSE_PENALTIES:
        kernel_MC, bias_C = np.zeros((len(mean_M), classes)), np.full(classes, UNSEEN)
        if labels.ndim == 1:
            model.set_params(C=penalty).fit(rows_EM, labels, weights)
            coef_CM, intercept_C = model.coef_, model.intercept_
            if len(model.classes_) == 2:  # scikit-learn fits one logit for two classes
                coef_CM = np.concatenate([-coef_CM, coef_CM]) / 2
                intercept_C = np.concatenate([-intercept_C, intercept_C]) / 2
            kernel_MC[:, model.classes_], bias_C[model.classes_] = coef_CM.T, intercept_C
        else:
            for c, column_E in enumerate(labels.T):
                if column_E.min() == column_E.max():
                    bias_C[c] = -UNSEEN if column_E[0] else UNSEEN
                    continue
                given = () if weights is None else (weights[:, c],)
                each[c].set_params(C=penalty).fit(rows_EM, column_E, *given)
                kernel_MC[:, c], bias_C[c] = each[c].coef_[0], each[c].intercept_[0]
        kernel_MC /= scale_M[:, None]
        bias_C -= mean_M @ kernel_MC
        f1 = score(wanted, valid_EM @ kernel_MC + bias_C)
        if found is None or f1 > found.f1:
            found = Solution(kernel_MC.astype(np.float32), bias_C.astype(np.float32), penalty, f1)
    return found


def _pooled(model: PooledClassifier, batch: Batch) -> dict[str, jax.Array]:
    firsts_B = batch.get("firsts")
    return {"features": model.pooled(batch["tokens"], batch["lengths"], firsts_B=firsts_B)}


class SolvedHead(TextClassification):
    """Task of a run without training steps: the head starts at the optimum and is evaluated at step 0.

    Takes the arguments of `TextClassification`. Features of a split are cached in `config.data.cache_dir`.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._pretrained_weights = NO_PRETRAINED_WEIGHTS
        self._encode = PerExample(_pooled)
        self._features: dict[str, np.ndarray] = {}

    @property
    def seedless(self) -> bool:
        """Whether all seeds give the same result: False if `reinitialize` or `data.shots` is set."""
        return not self.config.reinitialize and not self.config.data.shots

    def pretrained_weights(self, abstract_model: AbstractModel) -> PretrainedWeights:
        """Returns the pretrained weights, and stores them for the cache key of the features."""
        self._pretrained_weights = super().pretrained_weights(abstract_model)
        return self._pretrained_weights

    def start(self, trainable: Params, frozen: Params) -> Params:
        """Returns the parameters with the solved head. Raises the errors of `solve` and `features`."""
        abstract_model = variables.abstract(self.build)
        values = ModelState(abstract_model, trainable, frozen, self.mesh)
        train, valid = (
            (self.features(values, split), self.splits[split].labels_E)
            for split in ("train", self.select)
        )
        found = solve(train, valid, len(self.classes), self.weights)
        if is_main():
            print(
                f"head: solved by logistic regression on {train[0].shape[1]:,} features of {len(train[1]):,}"
                f" examples; inverse penalty {found.inverse_penalty:g}, chosen on the split {self.select}"
            )
        head = {KERNEL: found.kernel_MC, BIAS: found.bias_C}
        return {**trainable, **place(head, {name: trainable[name].sharding for name in head})}

    def features(self, values: ModelState, split: str) -> np.ndarray:
        """Returns the head's inputs for every example of a split, (E, M) float32, cached on disk.

        Raises a UserError if the cache cannot be written.
        """
        if split not in self._features:
            cache = Path(os.path.expanduser(self.config.data.cache_dir))
            path = cache / f"features-{self._key(split)}.npy"
            # If the file is missing on any process, all processes compute the features together.
            if all_reduce_max(np.asarray([not path.exists()]))[0]:
                count = len(self.splits[split])
                found = self._encode(values, self.every(split), count)["features"]
                if is_main():
                    write_atomic(path, lambda file: np.save(file, found), "--config.data.cache_dir")
                self._features[split] = found
            else:
                self._features[split] = np.load(path)
        return self._features[split]

    def _key(self, split: str) -> str:
        config = self.config
        dtype = compute_dtype(config.model.dtype).name
        drawn = (config.reinitialize, str(config.seed)) if config.reinitialize else ()
        return fingerprint(
            [self._pretrained_weights.fingerprint, self.splits[split].fingerprint],
            [self.tokenizer.fingerprint, str(config.data.max_length), config.pool],
            [config.quantize, dtype, *drawn, commit()],
        )

    def logits(self, values: ModelState, split: str) -> np.ndarray:
        """Returns the logits of a split, (E, C), from the cached features."""
        kernel_MC, bias_C = (np.asarray(values.trainable[name]) for name in (KERNEL, BIAS))
        return self.features(values, split) @ kernel_MC + bias_C
