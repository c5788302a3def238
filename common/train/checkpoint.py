"""Checkpoints: the newest to go on from, the best to use, snapshots on the way; and what a seed says is not stored.

The JSON part (`meta`) of a checkpoint holds step, clock, curve, data position and the fingerprint of the drawn layers;
the array part what is trained, its optimizer state, and frozen weights that were given (pretrained).
"""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from common.config import check
from common.errors import UserError
from common.runtime.processes import barrier, is_main
from common.sharding import place, shardings
from common.variables import AbstractModel, Params, draw_frozen, fingerprint


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """The sum of all bits as 32-bit integers: the same for every sharding, and changed by any single flipped bit."""

    def one(x: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32))

    return sum((one(leaf) for leaf in jax.tree.leaves(tree)), jnp.uint32(0))


SNAPSHOTS = "snapshots"
"""The folder of those that are kept for good: values alone, without the optimizer's."""


TOP = "top"
"""The folder of the best ones, where a run keeps several: values alone."""


class Damaged(Exception):
    """A checkpoint whose content is not what was written."""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__


def unless_failing(barrier: Callable[..., None]) -> Callable[..., None]:
    """A barrier that a thread does not wait at while it is failing.

    A process that cannot write its part of a checkpoint is led by orbax to another barrier than the others, where all
    would wait for each other for twenty minutes. Its error comes out at the next checkpoint instead, and ends it.
    """

    def wait(**arguments: Any) -> None:
        if error := sys.exc_info()[1]:
            raise error
        barrier(**arguments)

    return wait


class Checkpoints:
    """The checkpoints below a workdir. All processes call all methods."""

    def __init__(self, workdir: Path, keep: int = 2, keep_best: int | None = None):
        self._directory = workdir.absolute() / "checkpoints"
        self._keep_best = keep_best
        # Orbax reports what it can mend itself through absl; what cannot be mended is said here, in one line.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._latest = self._manager("latest", keep)
        # The best and the one before: a run that is killed between best and latest goes on from before the best.
        self._best = self._manager("best", 2)

    @cached_property
    def _top(self) -> ocp.CheckpointManager:
        """Of the runs that keep several of their best, by the score that each was saved with."""
        return self._manager(TOP, self._keep_best, best_fn=lambda metrics: metrics["score"])

    @cached_property
    def _snapshots(self) -> ocp.CheckpointManager:
        """Of the few runs that have some."""
        return self._manager(SNAPSHOTS, None)

    def _manager(
        self, name: str, keep: int | None, best_fn: Callable[[dict], float] | None = None
    ) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            best_fn=best_fn,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=unless_failing(ocp.multihost.get_barrier_sync_fn())
            ),
        )
        return ocp.CheckpointManager(self._directory / name, options=options)

    @property
    def exist(self) -> bool:
        return bool(self._latest.all_steps())

    def save(self, step: int, state: Any, meta: dict) -> None:
        """Starts writing; the arrays may be donated as soon as it returns.

        What a checkpoint's curve calls the best is on disk before the checkpoint is, and so are earlier snapshots.
        """
        for manager in self._open[1:]:
            manager.wait_until_finished()
        self._save(self._latest, step, state, meta)

    def save_best(self, step: int, state: Any, meta: dict) -> None:
        self._save(self._best, step, state, meta)

    def save_top(self, step: int, state: Any, meta: dict, score: float) -> None:
        """Saves one if it is among the `keep_best` best by their scores, in place of the last; more is better."""
        kept = self.top()
        if len(kept) < self._keep_best or score > self._score(kept[-1]):
            self._save(self._top, step, state, meta, {"score": score})

    def top(self) -> list[int]:
        """The steps that `save_top` keeps, the best first."""
        self._top.wait_until_finished()  # a score can be read when it is on disk
        return sorted(self._top.all_steps(), key=self._score, reverse=True)

    def _score(self, step: int) -> float:
        return self._top.metrics(step)["score"]

    def save_snapshot(self, step: int, state: Any, meta: dict) -> None:
        """One that is kept whatever comes after it."""
        self._save(self._snapshots, step, state, meta)

    def _save(
        self,
        manager: ocp.CheckpointManager,
        step: int,
        state: Any,
        meta: dict,
        metrics: dict[str, float] | None = None,
    ) -> None:
        if step in manager.all_steps():
            return
        meta = {**meta, "checksum": int(checksum(state))}
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
        )
        manager.save(step, args=arguments, metrics=metrics, force=True)

    def restore(self, target: Any, say: Any = print) -> tuple[Any, dict]:
        """The newest intact checkpoint, its arrays placed as the abstract `target` says.

        Damaged newer ones are set aside and named through `say`.

        Raises:
          UserError: there are checkpoints, but none is intact.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._latest.all_steps(), reverse=True):
            try:
                result = self._read(self._latest, step, target)
            except (
                Exception
            ) as error:  # orbax and its storage raise whatever a damaged file provokes
                damaged[step] = _reason(error)
                continue
            # Only now: where none can be read, the fault may lie elsewhere, and all stay where they are.
            for newer, reason in damaged.items():
                self._set_aside(newer)
                say(f"checkpoint {newer} is damaged ({reason}); set aside, going back to {step}")
            return result
        reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
        raise UserError(
            f"no intact checkpoint in {self._directory} ({reasons}); remove the workdir to start anew"
        )

    def restore_best(self, target: Any, step: int | None = None) -> tuple[Any, dict]:
        """The best checkpoint by the validation objective, or that of `step`.

        Raises:
          UserError: it is missing or damaged.
        """
        steps = self._best.all_steps()
        chosen = max(steps, default=None) if step is None else step
        if chosen not in steps:
            raise UserError(
                f"no best checkpoint{'' if step is None else f' {step}'} in {self._directory / 'best'}: the run has"
                " not reached its first evaluation, or it was removed"
            )
        return self._use("best", self._best, chosen, target)

    def restore_top(self, target: Any, step: int) -> tuple[Any, dict]:
        """One of those that `top` names.

        Raises:
          UserError: it is damaged.
        """
        return self._use("top", self._top, step, target)

    def restore_snapshot(self, target: Any, step: int) -> tuple[Any, dict]:
        """The snapshot of `step`.

        Raises:
          UserError: it is missing or damaged.
        """
        check_snapshot(self._directory.parent, step)
        return self._use("snapshot", self._snapshots, step, target)

    def _use(
        self, what: str, manager: ocp.CheckpointManager, step: int, target: Any
    ) -> tuple[Any, dict]:
        """Reads a checkpoint that is to be used, not gone on from."""
        try:
            return self._read(manager, step, target)
        except Exception as error:
            path = manager.directory / str(step)
            if differences := _differences(path, target):
                raise UserError(
                    f"the {what} checkpoint, {path}, does not fit the configuration beside it: {differences}"
                ) from error
            raise UserError(
                f"the {what} checkpoint, {path}, is damaged ({_reason(error)}); train on for another,"
                " or begin in another --workdir"
            ) from error

    def _read(self, manager: ocp.CheckpointManager, step: int, target: Any) -> tuple[Any, dict]:
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(target), meta=ocp.args.JsonRestore()
        )
        result = manager.restore(step, args=arguments)
        if int(checksum(result.state)) != result.meta["checksum"]:
            raise Damaged("its checksum does not fit its content")
        return result.state, result.meta

    def _set_aside(self, step: int) -> None:
        if is_main():
            grave = self._directory / "damaged"
            grave.mkdir(exist_ok=True)
            source, number = self._directory / "latest" / str(step), 0
            while (target := grave / f"{step}.{number}").exists():
                number += 1
            source.rename(target)
        barrier(f"set aside {step}")
        self._latest.reload()

    @property
    def _open(self) -> list[ocp.CheckpointManager]:
        """The newest first."""
        managers = [self._latest, self._best]
        return managers + [
            vars(self)[name] for name in ("_top", "_snapshots") if name in vars(self)
        ]

    def wait(self) -> None:
        """Until all that was saved is on disk."""
        for manager in self._open:
            manager.wait_until_finished()

    def close(self) -> None:
        for manager in self._open:
            manager.close()


def snapshots(workdir: Path) -> list[int]:
    """The steps of which a run has snapshots, in their order."""
    found = (workdir / "checkpoints" / SNAPSHOTS).glob("*")
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def check_snapshot(workdir: Path, step: int) -> None:
    """Raises:
    UserError: the run has no snapshot of this step.
    """
    there = snapshots(workdir)
    check(
        step in there,
        f"no snapshot of step {step} in {workdir / 'checkpoints' / SNAPSHOTS}; there are: {there or 'none'}"
        " (--config.checkpoint.snapshots says how often training makes one)",
    )


def _differences(path: Path, target: Any) -> str:
    """What a checkpoint holds that `target` does not ask for, or in another shape, and the reverse; "" for nothing."""
    try:
        with ocp.StandardCheckpointer() as reader:
            tree = reader.metadata(path / "state").item_metadata.tree
    except Exception:  # orbax and its storage raise whatever a damaged file provokes
        return ""
    there, here = (
        {n: x.shape for part in tree.values() for n, x in part.items()} for tree in (tree, target)
    )
    found = [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return ", ".join(found[:2]) + more


def draw_reservoirs(
    abstract_model: AbstractModel, seed: int, mesh: jax.sharding.Mesh
) -> tuple[Params, str]:
    """The frozen values that follow from the seed, on the mesh, and their fingerprint."""
    values: dict[str, np.ndarray] = draw_frozen(abstract_model, seed)
    return place(values, shardings(abstract_model.drawn, mesh)), fingerprint(values)


def stored(
    abstract_model: AbstractModel, everything: bool, mesh: jax.sharding.Mesh, outside: Params
) -> dict[str, Any]:
    """The abstract frozen values of a checkpoint: those given, or `everything`, but none that lie `outside`."""
    left = outside.keys() | (set() if everything else abstract_model.drawn.keys())
    return abstract({n: v for n, v in abstract_model.frozen.items() if n not in left}, mesh)


def abstract(some: Mapping[str, Any], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What arrays will be read for these variables, and where they will lie."""
    where = shardings(some, mesh)
    return {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where[n]) for n, v in some.items()}


def verify_frozen(meta: dict, drawn: str, outside: str) -> None:
    """The layers drawn here, and those read from files, have to be what the checkpoint was trained with.

    Raises:
      UserError: they differ (another version of NumPy or of its linear algebra; other files).
    """
    if meta.get("outside", "") != outside:
        raise UserError(
            "the pretrained weights are not those that this run began with: their files have changed,"
            " or another folder is named"
        )
    if meta["reservoirs"] not in (drawn, None):
        raise UserError(
            "the frozen layers drawn from the seed on this machine differ from those of the checkpoint; train with"
            " --config.checkpoint.store_frozen=true to keep them in the checkpoint"
        )
