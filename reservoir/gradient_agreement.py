"""Compares the gradient estimates of backskipping with exact gradients, at each snapshot of a run.

The estimate is the gradient of a step that skips the reservoirs. Shape letters of this module: B batches, R draws of
dropout and of the noise that backskipping adds, P parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common.config import complete
from common.errors import check
from common.report.panels import COLOURS, panels
from common.storage.addresses import shown
from common.train.prefetch import put
from common.train.restore import load_run, read_config, snapshots
from common.train.state import Step
from common.train.workdir import CONFIG
from common.variables import Params
from reservoir import run
from reservoir.backskip import ESTIMATORS, NEVER, BackskipBlock
from reservoir.saved import with_defaults
from reservoir.skipping import Backskipping


class Agreement(NamedTuple):
    """Agreement of two gradients: the estimate, from a skipping step, and the true gradient, from an ordinary step.

    Attributes:
      cosine: cosine of the two gradients, averaged over batches and draws. None if any gradient is 0.
      cosine_of_means: cosine of the two gradients after averaging each over the draws, averaged over batches. With many
        draws, a value below 1 is due to the bias of the estimate, not to its variance. None if an average is 0.
      size: ratio of the norm of the estimate to the norm of the true gradient. The ratio is averaged over batches and
        draws.
    """

    cosine: float | None
    cosine_of_means: float | None
    size: float


def agreement(true_BRP: np.ndarray, estimate_BRP: np.ndarray) -> Agreement:
    """Returns the agreement of true and estimated gradients, both (B, R, P): one gradient for each batch and draw.

    `size` is not finite if a true gradient is 0.
    """
    sizes = np.linalg.norm(estimate_BRP, axis=-1) / np.linalg.norm(true_BRP, axis=-1)
    of_means = _cosine(true_BRP.mean(1), estimate_BRP.mean(1))
    return Agreement(_cosine(true_BRP, estimate_BRP), of_means, float(np.mean(sizes)))


def _cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return float(np.mean((a * b).sum(-1) / norms)) if norms.all() else None


def below_reservoirs(model: nnx.Module, names: Sequence[str]) -> list[str]:
    """Returns the elements of `names` that are parameters of layers below the uppermost reservoir of their stack.

    Leaves out the parameters of value networks.

    Args:
      model: a model with backskipping.
      names: paths of the trained parameters.
    """
    uppermost = {
        "/".join(map(str, path[:-1])): path[-1]
        for path, part in nnx.iter_modules(model)
        if isinstance(part, BackskipBlock)
    }
    below = [f"{stack}/{i}/" for stack, last in uppermost.items() for i in range(last)]
    return [n for n in names if n.startswith(tuple(below)) and "baseline" not in n.split("/")]


def measure(workdir: Path, mesh: Mesh, batches: int, draws: int) -> Iterator[tuple[int, Agreement]]:
    """Yields (step, agreement of the gradients) for each snapshot of a run with backskipping.

    Args:
      batches: number of training batches.
      draws: number of draws of noise and dropout for each batch. Both gradients of a draw have the same noise and
        dropout.

    Raises:
      UserError: the folder has no run of this paper, or the run has an estimator or a task that never skips, no
        snapshots, no trained layer below a reservoir, an invalid configuration or data, or a damaged snapshot.
    """
    config = read_config(workdir, "RUNS", "reservoir")
    with complete(shown(workdir / CONFIG)):
        config.model = with_defaults(config.model)
        estimator = config.model.backskip.estimator
    # Do not scan over layers: a scan needs the stacked arrays of all layers, but `load_run` returns an array per layer.
    config.train.scan_layers = 0
    check(
        estimator not in NEVER,
        f"{shown(workdir)} skips no reservoirs, because its --config.model.backskip.estimator is {estimator}: give a"
        f" run with the estimator {' or '.join(e for e in ESTIMATORS if e not in NEVER)}",
    )
    steps = snapshots(workdir)
    check(
        bool(steps),
        f"{shown(workdir)} has no snapshots; train a run with --config.checkpoint.snapshots=N, which keeps a snapshot"
        " every N steps",
    )
    config, task = run.prepare(config, mesh)
    check(
        isinstance(task, Backskipping),
        f"{shown(workdir)} is a run of --config.task={config.task}, which never skips reservoirs: give a run of the"
        f" task {' or '.join(run.TASKS)}",
    )
    step = Step.of(config, task, mesh)
    whole = step.abstract_model
    names = below_reservoirs(whole.build(whole.trainable, whole.frozen), list(whole.trainable))
    check(
        bool(names),
        f"{shown(workdir)} has no trained layer below a reservoir: give a run whose --config.model.placement puts a"
        " trained layer below a reservoir",
    )

    losses = task.loss, task.skipping_loss
    gradients = [jax.jit(partial(_gradient, step, loss, names)) for loss in losses]
    keys = jax.random.split(jax.random.key(config.seed), draws)
    chosen = [put(batch, mesh) for batch, _ in islice(task.batches(None), batches)]
    for number in steps:
        values = load_run(
            workdir, config, task.build, mesh, task.pretrained_weights, snapshots=(number,)
        )
        arrays = values.trainable, values.frozen
        true_BRP, estimate_BRP = (
            np.stack([[np.asarray(one(*arrays, x, key)) for key in keys] for x in chosen])
            for one in gradients
        )
        yield number, agreement(true_BRP, estimate_BRP)


def _gradient(
    step: Step,
    loss: Callable,
    names: Sequence[str],
    trainable: Params,
    frozen: Params,
    batch: Any,
    key: jax.Array,
) -> jax.Array:
    """Returns the gradient of the loss with respect to the parameters `names`, as one float32 vector."""
    _, _, gradients = step.gradients(loss, trainable, frozen, batch, key)
    return jnp.concatenate([gradients[name].astype(jnp.float32).ravel() for name in names])


PANELS = {
    "cosine": "cosine with the true gradient",
    "cosine_of_means": "cosine of means over the noise",
    "size": "size relative to the true gradient",
}
"""Field of `Agreement` -> title of its panel."""


def draw(measured: Mapping[str, Sequence[Sequence[tuple[int, Agreement]]]], path: Path) -> None:
    """Plots each field of `Agreement` against the step, in a panel of its own.

    Args:
      measured: name of a group -> runs of the group. A run is a list of (step, agreement) pairs, and is one line in
        each panel.
    """
    figure, axes = panels(len(PANELS))
    for panel, (name, title) in zip(axes, PANELS.items(), strict=True):
        for number, (group, runs) in enumerate(measured.items()):
            for index, points in enumerate(runs):
                values = [(step, getattr(found, name)) for step, found in points]
                # A cosine is None if a gradient is 0: leave out such a step.
                xs, ys = np.array([v for v in values if v[1] is not None]).reshape(-1, 2).T
                style = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.4}
                panel.plot(xs, ys, label=group if index == 0 else None, **style)
        panel.set(xlabel="step", title=title)
        panel.axhline(1, color="#888888", linewidth=0.8, linestyle=":")
    for panel in axes[:2]:
        panel.set_ylim(top=1.05)
    handles, names = axes[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path)
