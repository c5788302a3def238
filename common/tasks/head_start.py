"""Computes the output layer of a language model with the function that the configuration field `head_start` names.

Shape letter of this module: n stands for the tokens of the training text.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from common import sharding, variables
from common.data.windows import scored_once
from common.errors import UserError, check, reason_of
from common.model.language_model import LanguageModel
from common.train.evaluate import PerExample
from common.train.task import Batch, ModelState
from common.user_parts import described, imported, user_code
from common.variables import Params

if TYPE_CHECKING:
    from common.tasks.language_modelling import LanguageModelling

OUTPUT = ("output/kernel", "output/bias")
"""Paths of the parameters of the output layer."""

_EXAMPLES = 50_000
"""Maximum number of training tokens that `output_layer` reads, rounded up to whole windows."""


def output_layer(task: "LanguageModelling", trainable: Params, frozen: Params) -> Params:
    """Returns new values of the output layer, {path: sharded array} with the paths of OUTPUT.

    `config.head_start` names a function as "module:attribute". The function gets features (E, D) of training tokens,
    the token that follows each of them (E,), and the keyword argument `outputs`, the size V of the vocabulary. The
    function must return a tuple of the kernel (D, V) and the bias (V,).

    Raises:
      UserError: the function cannot be imported, raises an exception or does not return such a tuple, or the output
        layer is tied to the embedding.
    """
    make = imported("--config.head_start", task.config.head_start)
    option = f"--config.head_start={task.config.head_start}"
    check(
        OUTPUT[0] in trainable,
        f"{option} needs an untied output layer: set --config.model.tied=false",
    )
    features_ED, labels_E = _examples(task, trainable, frozen)
    with user_code(option):
        returned = make(features_ED, labels_E, outputs=task.vocabulary)
    current = {name: trainable[name] for name in OUTPUT}
    expected = (
        f"{option} must return a tuple of two arrays, the kernel and the bias of the output layer, of shapes"
        f" {tuple(x.shape for x in current.values())}"
    )
    got = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else described(returned)
    check(got == f"a tuple of {len(OUTPUT)}", f"{expected}, got {got}")
    try:
        new = {n: np.asarray(x, current[n].dtype) for n, x in zip(OUTPUT, returned, strict=True)}
    except (TypeError, ValueError) as error:
        raise UserError(f"{expected} ({reason_of(error)})") from error
    found = tuple(x.shape for x in new.values())
    check(found == tuple(x.shape for x in current.values()), f"{expected}, got {found}")
    return sharding.place(new, {name: x.sharding for name, x in current.items()})


def _examples(
    task: "LanguageModelling", trainable: Params, frozen: Params
) -> tuple[np.ndarray, np.ndarray]:
    """Returns features (E, D) and next tokens (E,) of windows that are evenly spaced in the training text."""
    tokens_n, length = task.splits["train"], task.config.model.length
    count = min(len(tokens_n) // length, -(-_EXAMPLES // length))
    starts = np.linspace(0, len(tokens_n) - length, count).astype(int)
    windows = np.stack([tokens_n[start : start + length] for start in starts])
    rows = task.config.eval.batch
    batches = scored_once(windows.reshape(-1), length, length, rows, multiple=task.multiple)
    abstract_model = variables.abstract(task.build)
    state = ModelState(abstract_model, trainable, frozen, task.mesh)
    features = PerExample(_features)(state, batches, count)["features"]
    # The last token of a window has no next token in the window.
    features_ED = features[:, :-1].reshape(-1, features.shape[-1])
    return features_ED, windows[:, 1:].reshape(-1).astype(np.int32)


def _features(model: LanguageModel, batch: Batch) -> dict[str, jax.Array]:
    return {"features": model.features(batch["tokens"]).astype(jnp.float32)}
