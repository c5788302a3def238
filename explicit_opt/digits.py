"""The task of sections 3.2 and 3.3: classifies images of digits.

Shape letters of this module: B examples of a batch, E images, M pixels, C classes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check_least
from common.data.batches import in_order
from common.data.cache import fingerprint, fingerprint_arrays
from common.errors import UserError, check
from common.metrics.classes import Classes
from common.model.linear import Linear
from common.model.loss import cross_entropy
from common.train.evaluate import PerExample
from common.train.task import Batch, ModelState
from common.variables import Params
from explicit_opt.solution import explicit_solution, fit_scale
from explicit_opt.start import INITIALIZERS, StartTask, validate_start

Images = tuple[np.ndarray, np.ndarray]
"""Pixels (E, M) uint8 and labels (E,)."""

EMBEDDED = "embedded:digits"
_HELD_OUT_DIGITS = 360  # test images: about a fifth of scikit-learn's digits


def validate(config: ConfigDict) -> None:
    """Raises a UserError for invalid configuration fields of a digit classifier. Reads no data."""
    check_least(config, ("model.layers",))
    check_least(config, ("data.held_out",), 0)
    check(
        config.solution.priming == 0 or config.solution.priming >= 1,
        "--config.solution.priming must be at least 1, or 0 for the mean L1 norm of the features,"
        f" got {config.solution.priming}",
    )
    check(
        config.start != "zero" or config.model.layers == 1,
        f"--config.start=zero cannot train --config.model.layers={config.model.layers}: all outputs of a hidden layer"
        " would stay equal; use --config.model.layers=1",
    )
    validate_start(config)


def load_images(source: str) -> tuple[Images, Images]:
    """Returns training and test images. `source` is "files:DIR" (with MNIST's names of IDX files) or "embedded:digits".

    Raises a UserError if the source is unknown, and the errors of `read_mnist`.
    """
    kind, _, path = source.partition(":")
    if source == EMBEDDED:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        pixels, cut = pixels.astype(np.uint8), len(labels) - _HELD_OUT_DIGITS
        return (pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])
    if kind != "files" or not path:
        raise UserError(f"--config.data.source={source} is unknown: use {EMBEDDED} or files:DIR")
    from explicit_opt.idx import read_mnist

    return read_mnist(path)


def features_of(pixels_EM: np.ndarray, levels: int) -> np.ndarray:
    """Returns the features H = (X + 1) / levels of pixels X from 0 to levels - 1 (section 3.2: 256 levels)."""
    return (pixels_EM.astype(np.float32) + 1) / np.float32(levels)


class SoftmaxLayers(nnx.Module):
    """A stack of linear layers without biases, with a softmax between layers (section 3.3)."""

    def __init__(self, features: int, outputs: int, layers: int, cold: str, *, rngs: nnx.Rngs):
        def layer(inputs: int) -> Linear:
            init = INITIALIZERS[cold](inputs)
            axes = ("embed", "vocab")
            return Linear(inputs, outputs, axes, rngs=rngs, kernel_init=init, bias_init=None)

        self.layers = nnx.List([layer(features)] + [layer(outputs) for _ in range(layers - 1)])

    def __call__(self, features_BM: jax.Array) -> jax.Array:
        """Returns logits (B, C)."""
        *hidden, last = self.layers
        for layer in hidden:
            features_BM = jax.nn.softmax(layer(features_BM))
        return last(features_BM)


def _log_probabilities(model: SoftmaxLayers, batch: Batch) -> dict[str, jax.Array]:
    return {"logs": jax.nn.log_softmax(model(batch["features"]))}


class Digits(StartTask):
    """Classification of images of digits.

    Args:
      read_data: False makes a task without images, which can only compile its training step. The task then has ten
        classes and the image size of MNIST or, for embedded:digits, of scikit-learn's digits.

    Raises a UserError if the configuration or the data are invalid.
    """

    objective, unit = "loss", "examples"

    def __init__(self, config: ConfigDict, mesh: Mesh, *, read_data: bool = True):
        validate(config)
        super().__init__(config, mesh)
        self.width, self.outputs = 64 if config.data.source == EMBEDDED else 784, 10
        self._log_probabilities = PerExample(_log_probabilities)
        if read_data:
            self._read_data()

    def _read_data(self) -> None:
        config = self.config
        train, test = load_images(config.data.source)
        held_out = config.data.held_out
        check(
            held_out < len(train[1]),
            f"--config.data.held_out={held_out} must be less than {len(train[1])}, the number of training images",
        )
        # With held_out=0, the test loss decides when training stops, apparently as in the paper.
        cut = len(train[1]) - held_out
        valid = tuple(part[cut:] for part in train) if held_out else test
        self.splits: dict[str, Images] = {
            "train": tuple(part[:cut] for part in train),
            "valid": valid,
            "test": test,
        }
        self.width = train[0].shape[1]
        self.outputs = int(self.splits["train"][1].max()) + 1
        # Check the test images first: with held_out=0 they are also the validation images, but errors must say "test".
        for split, (pixels, labels) in reversed(self.splits.items()):
            source = f"--config.data.source={config.data.source}: the {split} images have"
            check(
                pixels.shape[1] == self.width,
                f"{source} {pixels.shape[1]} pixels, but the training images have {self.width}: use images of one size",
            )
            check(
                int(labels.max()) < self.outputs,
                f"{source} labels up to {labels.max()}, but the {cut} images for training (all except the last"
                f" --config.data.held_out={held_out}) have labels up to {self.outputs - 1}: shuffle the training"
                " images, or add images with the missing labels",
            )
        self.levels = int(self.splits["train"][0].max()) + 1
        self.set_examples(self._gather("train"), cut)

    def build(self, rngs: nnx.Rngs) -> SoftmaxLayers:
        model = self.config.model
        return SoftmaxLayers(self.width, self.outputs, model.layers, model.cold, rngs=rngs)

    def nats(self, model: SoftmaxLayers, batch: Batch) -> jax.Array:
        return cross_entropy(model(batch["features"]), batch["targets"])

    def inputs(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"features": jax.ShapeDtypeStruct((rows, self.width), np.float32)}

    def features(self, split: str) -> np.ndarray:
        """Returns the features of all images of a split, (E, M)."""
        return features_of(self.splits[split][0], self.levels)

    def _gather(self, split: str) -> Callable[[np.ndarray], Batch]:
        pixels, labels = self.splits[split]

        def gather(ids_B: np.ndarray) -> Batch:
            at_B = np.maximum(ids_B, 0)
            return {
                "features": features_of(pixels[at_B], self.levels),
                "targets": labels[at_B].astype(np.int32),
                "weights": (ids_B >= 0).astype(np.float32),
            }

        return gather

    def explicit_start(self, trainable: Params) -> Params:
        names = [f"layers/{number}/kernel" for number in range(self.config.model.layers)]
        return {
            name: jax.device_put(kernel, trainable[name].sharding)
            for name, kernel in zip(names, self.solution(), strict=True)
        }

    def solution(self) -> list[jax.Array]:
        """Returns the kernels of all layers: the explicit solution with the classes as targets of every layer.

        Layers are solved from the first to the last. The input of a later layer is a softmax with L1 norm 1, so K
        is 1 for this layer (section 3.3). With `start=scaled`, each kernel is multiplied by the factor that minimises
        the cross-entropy of the layer's outputs on the training images (`fit_scale`).
        """
        features, targets = jnp.asarray(self.features("train")), self.splits["train"][1]

        @jax.jit
        def loss(scale: jax.Array, logits_EC: jax.Array) -> jax.Array:
            return cross_entropy(scale * logits_EC, targets).mean()

        solution, kernels = self.config.solution, []
        for number in range(self.config.model.layers):
            kernels.append(
                explicit_solution(
                    features,
                    targets,
                    (solution.priming or None) if number == 0 else 1.0,
                    outputs=self.outputs,
                    exponent=self.exponent if number == 0 else None,
                    sign=solution.sign,
                )
            )
            logits_EC = features @ kernels[-1]
            if self.config.start == "scaled":
                scale = fit_scale(lambda s, z=logits_EC: float(loss(s, z)))
                kernels[-1], logits_EC = scale * kernels[-1], scale * logits_EC
            features = jax.nn.softmax(logits_EC)
        return kernels

    def predict(self, values: ModelState, split: str) -> Classes:
        """Returns class probabilities of every image of a split."""
        pixels, labels = self.splits[split]
        batches = in_order(self._gather(split), len(labels), 1024, multiple=self.multiple)
        return Classes.of_log_probabilities(
            fingerprint([pixels.tobytes().hex()], map(str, labels)),
            labels,
            self._log_probabilities(values, batches, len(labels))["logs"],
            tuple(map(str, range(self.outputs))),
        )

    def fingerprints(self) -> dict[str, str]:
        return {f"the {split} split": fingerprint_arrays(*x) for split, x in self.splits.items()}
