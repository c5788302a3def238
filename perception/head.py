"""The classifier's head alone, at its optimum: logistic regression on what the frozen encoder gives it.

A head that is trained step by step measures the optimizer as much as the features. The regression is convex, so it has
one optimum for each penalty, and the penalty is chosen by the validation examples.

M examples, E = 2 D inputs of the head, N classes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import variables
from common.config import check
from common.data.cache import fingerprint, write_atomic
from common.data.labelled import LabelledText
from common.data.subword import Subword
from common.metrics.classes import weighted_f1
from common.metrics.predictions import Classes
from common.model.transformer import compute_dtype
from common.runtime.processes import all_reduce_max, is_main
from common.sharding import place
from common.tasks.classification import Build
from common.train.evaluate import PerExample
from common.train.frozen import draw_on_mesh
from common.train.task import NO_PRETRAINED_WEIGHTS, Batch, ModelState, PretrainedWeights
from common.train.workdir import commit
from common.variables import AbstractModel, Params
from perception.model import PooledClassifier
from perception.task import TextClassification

INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""C of the regression on standardised features, one of which is chosen."""

KERNEL, BIAS = "head/kernel", "head/bias"

UNSEEN = -100.0
"""The bias of a class that the training examples lack."""


class Solution(NamedTuple):
    """Attributes:
    kernel_EN, bias_N: float32, of logits from features that are not standardised.
    inverse_penalty: the chosen C; f1: weighted, in percent, on the examples that chose it.
    """

    kernel_EN: np.ndarray
    bias_N: np.ndarray
    inverse_penalty: float
    f1: float


def solve(
    train: tuple[np.ndarray, np.ndarray], valid: tuple[np.ndarray, np.ndarray], classes: int
) -> Solution:
    """Multinomial logistic regression on standardised features, with C chosen by weighted F1 on `valid`.

    Args:
      train, valid: features (M, E) and labels (M,).

    Raises:
      UserError: the training examples are all of one class.
    """
    from sklearn.linear_model import LogisticRegression

    (train_ME, labels_M), (valid_ME, wanted_M) = train, valid
    check(len(np.unique(labels_M)) > 1, "the training examples are all of one class")
    mean_E, deviation_E = train_ME.mean(0, np.float64), train_ME.std(0, dtype=np.float64)
    scale_E = np.where(deviation_E > 0, deviation_E, 1.0)
    rows_ME = (train_ME - mean_E) / scale_E
    # Each penalty starts at the solution for the one before.
    model = LogisticRegression(tol=1e-6, max_iter=10_000, warm_start=True)
    found: Solution | None = None
    for penalty in INVERSE_PENALTIES:
        model.set_params(C=penalty).fit(rows_ME, labels_M)
        weights_KE, bias_K = model.coef_, model.intercept_
        if len(model.classes_) == 2:  # one logit, the difference of two
            weights_KE = np.concatenate([-weights_KE, weights_KE]) / 2
            bias_K = np.concatenate([-bias_K, bias_K]) / 2
        kernel_EN, bias_N = np.zeros((len(mean_E), classes)), np.full(classes, UNSEEN)
        kernel_EN[:, model.classes_] = (weights_KE / scale_E).T
        bias_N[model.classes_] = bias_K - mean_E @ kernel_EN[:, model.classes_]
        f1 = weighted_f1(wanted_M, (valid_ME @ kernel_EN + bias_N).argmax(-1))
        if found is None or f1 > found.f1:
            found = Solution(kernel_EN.astype(np.float32), bias_N.astype(np.float32), penalty, f1)
    return found


def _pooled(model: PooledClassifier, batch: Batch) -> dict[str, jax.Array]:
    return {"features": model.pooled(batch["tokens"], batch["lengths"])}


class SolvedHead(TextClassification):
    """The task of a run of no steps: it starts at the optimum, and is evaluated there.

    The features of a split are computed once, and kept in `config.data.cache_dir` for other runs.

    Args:
      outside: as `Task.outside`.
    """

    def __init__(
        self,
        config: ConfigDict,
        tokenizer: Subword,
        build: Build,
        mesh: Mesh,
        labelled: tuple[dict[str, LabelledText], tuple[str, ...]],
        outside: Callable[[AbstractModel], PretrainedWeights],
    ):
        self._read, self._pretrained = outside, NO_PRETRAINED_WEIGHTS
        functions = {"start": self._optimum, "outside": self._keep}
        super().__init__(config, tokenizer, build, mesh, labelled, **functions)
        self._encode = PerExample(_pooled, mesh)
        self._features: dict[str, np.ndarray] = {}

    @property
    def seedless(self) -> bool:
        """Only tables of the encoder that are drawn anew depend on the seed."""
        return not self.config.reinitialize

    def _keep(self, abstract_model: AbstractModel) -> PretrainedWeights:
        """`Task.outside`; kept, since `Task.start` has no frozen values."""
        self._pretrained = self._read(abstract_model)
        return self._pretrained

    def _optimum(self, trainable: Params) -> Params:
        """`Task.start`.

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
        head = {KERNEL: found.kernel_EN, BIAS: found.bias_N}
        return {**trainable, **place(head, {name: trainable[name].sharding for name in head})}

    def features(self, values: ModelState, split: str) -> np.ndarray:
        """What the head reads of every example of a split, (M, E) float32."""
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
        """What the features follow from."""
        config = self.config
        dtype = compute_dtype(config.model.dtype).name
        drawn = (config.reinitialize, str(config.seed)) if config.reinitialize else ()
        return fingerprint(
            [self._pretrained.fingerprint, self.splits[split].fingerprint],
            [self.tokenizer.fingerprint, str(config.data.max_length), config.pool],
            [config.quantize, dtype, *drawn, commit()],
        )

    def predict(self, values: ModelState, split: str) -> Classes:
        """As `Classification.predict`, from the features."""
        split = self.select if split == "valid" else split
        kernel_EN, bias_N = (np.asarray(values.trainable[name]) for name in (KERNEL, BIAS))
        logits_MN = self.features(values, split) @ kernel_EN + bias_N
        text = self.splits[split]
        logs_MN = np.asarray(jax.nn.log_softmax(logits_MN))
        return Classes.of_log_probabilities(text.fingerprint, text.labels_M, logs_MN, self.classes)
