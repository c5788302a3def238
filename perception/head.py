"""Solves the classification head by logistic regression on the cached features of the frozen encoder.

Logistic regression is convex, so the result does not depend on an optimizer or a seed. The penalty is chosen on the
validation examples.

E examples, M inputs of the head (twice the width), C classes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from common import variables
from common.config import check
from common.data.cache import fingerprint, write_atomic
from common.metrics.classes import weighted_f1
from common.metrics.predictions import Classes
from common.model.transformer import compute_dtype
from common.runtime.processes import all_reduce_max, is_main
from common.sharding import place
from common.train.evaluate import PerExample
from common.train.frozen import draw_on_mesh
from common.train.task import NO_PRETRAINED_WEIGHTS, Batch, ModelState, PretrainedWeights
from common.train.workdir import commit
from common.variables import AbstractModel, Params
from perception.model import PooledClassifier
from perception.task import TextClassification

INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Candidate values of C, the inverse penalty, on standardised features."""

KERNEL, BIAS = "head/kernel", "head/bias"

UNSEEN = -100.0
"""Bias of a class without training examples."""


class Solution(NamedTuple):
    """Attributes:
    kernel_MC, bias_C: float32, of logits from features that are not standardised.
    inverse_penalty: the chosen C; f1: weighted, in percent, on the examples that chose it.
    """

    kernel_MC: np.ndarray
    bias_C: np.ndarray
    inverse_penalty: float
    f1: float


def solve(
    train: tuple[np.ndarray, np.ndarray], valid: tuple[np.ndarray, np.ndarray], classes: int
) -> Solution:
    """Fits multinomial logistic regression on standardised features; chooses C by weighted F1 on `valid`.

    Args:
      train, valid: features (E, M) and labels (E,).

    Raises:
      UserError: the training examples are all of one class.
    """
    from sklearn.linear_model import LogisticRegression

    (train_EM, labels_E), (valid_EM, wanted_E) = train, valid
    check(
        len(np.unique(labels_E)) > 1,
        "all training examples have the same class: check --config.data.label",
    )
    mean_M, deviation_M = train_EM.mean(0, np.float64), train_EM.std(0, dtype=np.float64)
    scale_M = np.where(deviation_M > 0, deviation_M, 1.0)
    rows_EM = (train_EM - mean_M) / scale_M
    # Each fit starts at the solution for the previous penalty.
    model = LogisticRegression(tol=1e-6, max_iter=10_000, warm_start=True)
    found: Solution | None = None
    for penalty in INVERSE_PENALTIES:
        model.set_params(C=penalty).fit(rows_EM, labels_E)
        coef_CM, intercept_C = model.coef_, model.intercept_
        if len(model.classes_) == 2:  # scikit-learn returns the difference of the two logits
            coef_CM = np.concatenate([-coef_CM, coef_CM]) / 2
            intercept_C = np.concatenate([-intercept_C, intercept_C]) / 2
        kernel_MC, bias_C = np.zeros((len(mean_M), classes)), np.full(classes, UNSEEN)
        kernel_MC[:, model.classes_] = (coef_CM / scale_M).T
        bias_C[model.classes_] = intercept_C - mean_M @ kernel_MC[:, model.classes_]
        f1 = weighted_f1(wanted_E, (valid_EM @ kernel_MC + bias_C).argmax(-1))
        if found is None or f1 > found.f1:
            found = Solution(kernel_MC.astype(np.float32), bias_C.astype(np.float32), penalty, f1)
    return found


def _pooled(model: PooledClassifier, batch: Batch) -> dict[str, jax.Array]:
    return {"features": model.pooled(batch["tokens"], batch["lengths"])}


class SolvedHead(TextClassification):
    """Task of a run without training steps: the head starts at the optimum and is evaluated there.

    Features are computed once for each split and cached in `config.data.cache_dir`.

    Args:
      arguments: positional arguments of `TextClassification`.
      outside: implementation of `Task.outside`.
    """

    def __init__(self, *arguments: Any, outside: Callable[[AbstractModel], PretrainedWeights]):
        self._read, self._pretrained = outside, NO_PRETRAINED_WEIGHTS
        super().__init__(*arguments, start=self._optimum, outside=self._keep)
        self._encode = PerExample(_pooled, self.mesh)
        self._features: dict[str, np.ndarray] = {}

    @property
    def seedless(self) -> bool:
        """True unless tables of the encoder are reinitialised from the seed."""
        return not self.config.reinitialize

    def _keep(self, abstract_model: AbstractModel) -> PretrainedWeights:
        """Implements `Task.outside` and keeps the result for `_optimum`, which needs the frozen parameters."""
        self._pretrained = self._read(abstract_model)
        return self._pretrained

    def _optimum(self, trainable: Params) -> Params:
        """Implements `Task.start`: returns the parameters with the solved head.

        Raises:
          UserError: the training examples are all of one class.
        """
        abstract_model = variables.abstract(lambda: self.build(variables.ParamKeys(0)))
        drawn, _ = draw_on_mesh(abstract_model, self.config.seed, self.mesh)
        values = ModelState(
            abstract_model, trainable, {**drawn, **self._pretrained.values}, self.mesh
        )
        train, valid = (
            (self.features(values, split), self.splits[split].labels_M)
            for split in ("train", self.select)
        )
        found = solve(train, valid, len(self.classes))
        if is_main():
            print(
                f"head: logistic regression on {train[0].shape[1]:,} features of {len(train[1]):,} examples,"
                f" C = {found.inverse_penalty:g} chosen by {self.select}"
            )
        head = {KERNEL: found.kernel_MC, BIAS: found.bias_C}
        return {**trainable, **place(head, {name: trainable[name].sharding for name in head})}

    def features(self, values: ModelState, split: str) -> np.ndarray:
        """Returns the head's inputs for every example of a split, (E, M) float32, cached on disk."""
        if split not in self._features:
            path = Path(self.config.data.cache_dir) / f"features-{self._key(split)}.npy"
            if all_reduce_max(np.asarray([not path.exists()]))[0]:  # on any process
                count = len(self.splits[split])
                found = self._encode(values, self.every(split), count)["features"]
                if is_main():
                    write_atomic(path, lambda file: np.save(file, found))
                self._features[split] = found
            else:
                self._features[split] = np.load(path)
        return self._features[split]

    def _key(self, split: str) -> str:
        """Returns the cache key of a split's features."""
        config = self.config
        dtype = compute_dtype(config.model.dtype).name
        drawn = (config.reinitialize, str(config.seed)) if config.reinitialize else ()
        return fingerprint(
            [self._pretrained.fingerprint, self.splits[split].fingerprint],
            [self.tokenizer.fingerprint, str(config.data.max_length), config.pool],
            [config.quantize, dtype, *drawn, commit()],
        )

    def predict(self, values: ModelState, split: str) -> Classes:
        """Returns class probabilities like `Classification.predict`, computed from the cached features."""
        split = self.select if split == "valid" else split
        kernel_MC, bias_C = (np.asarray(values.trainable[name]) for name in (KERNEL, BIAS))
        logits_EC = self.features(values, split) @ kernel_MC + bias_C
        text = self.splits[split]
        logs_EC = np.asarray(jax.nn.log_softmax(logits_EC))
        return Classes.of_log_probabilities(text.fingerprint, text.labels_M, logs_EC, self.classes)
