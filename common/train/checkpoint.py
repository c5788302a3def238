"""Checkpoints: the newest to resume from, the best to use, snapshots for good, and the frozen values, written once.

The JSON part (`meta`) of a checkpoint is `common.train.run.RunState`; the array part is {"trainable", "optimizer",
"frozen"}. "frozen" is empty but in checkpoints from before November 2026, which could hold all frozen values.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from common.config import check
from common.errors import UserError
from common.runtime.processes import barrier, is_main
from common.sharding import shardings
from common.variables import Params


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """The sum of all bits as 32-bit integers: the same for every sharding, and changed by any single flipped bit."""

    def one(x: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32))

    return sum((one(leaf) for leaf in jax.tree.leaves(tree)), jnp.uint32(0))


SNAPSHOTS = "snapshots"
"""The folder of snapshots, which are kept for good and have no optimizer state."""


TOP = "top"
"""The folder of the best checkpoints of a run that keeps several, without optimizer state."""


class Damaged(Exception):
    """The content of a checkpoint differs from its checksum."""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__


def unless_failing(barrier: Callable[..., None]) -> Callable[..., None]:
    """Wraps a barrier so that a thread that is handling an exception raises it instead of waiting.

    A process that fails to write its part of a checkpoint would otherwise wait at another barrier than the others, for
    orbax's timeout of twenty minutes.
    """

    def wait(**arguments: Any) -> None:
        if error := sys.exc_info()[1]:
            raise error
        barrier(**arguments)

    return wait


class Checkpoints:
    """The checkpoints of a workdir. Every method is collective: all processes call it."""

    def __init__(self, workdir: Path, keep: int = 2, keep_best: int | None = None):
        self._directory = workdir.absolute() / "checkpoints"
        self._keep_best = keep_best
        # Orbax logs recoverable faults through absl; this class reports the others in one line.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._latest = self._manager("latest", keep)
        # Two, since a run that is killed after saving a new best one may resume from before it.
        self._best = self._manager("best", 2)
        self._frozen = self._manager("frozen", 1)

    @cached_property
    def _top(self) -> ocp.CheckpointManager:
        """The manager of the best checkpoints, ordered by score."""
        return self._manager(TOP, self._keep_best, best_fn=lambda metrics: metrics["score"])

    @cached_property
    def _snapshots(self) -> ocp.CheckpointManager:
        """The manager of snapshots."""
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
        """Starts writing a checkpoint; the arrays may be donated as soon as this returns.

        First waits until the best checkpoint and the snapshots that its metadata refers to are on disk.
        """
        for manager in self._open[1:]:
            manager.wait_until_finished()
        self._save(self._latest, step, state, meta)

    def save_best(self, step: int, state: Any, meta: dict) -> None:
        self._save(self._best, step, state, meta)

    def save_top(self, step: int, state: Any, meta: dict, score: float) -> None:
        """Saves a checkpoint if its score is among the `keep_best` largest."""
        kept = self.top()
        if len(kept) < self._keep_best or score > self._score(kept[-1]):
            self._save(self._top, step, state, meta, {"score": score})

    def top(self) -> list[int]:
        """Steps of the checkpoints that `save_top` keeps, the best first."""
        self._top.wait_until_finished()  # a score can be read when it is on disk
        return sorted(self._top.all_steps(), key=self._score, reverse=True)

    def _score(self, step: int) -> float:
        return self._top.metrics(step)["score"]

    def save_snapshot(self, step: int, state: Any, meta: dict) -> None:
        """Saves a checkpoint that is never deleted."""
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

    def save_frozen(self, values: Params, meta: dict) -> None:
        """Writes the values that no step changes, in place of those of a run that never reached a checkpoint."""
        if self._frozen.all_steps():
            self._frozen.delete(0)
        self._save(self._frozen, 0, {"frozen": values}, meta)

    def frozen_metadata(self) -> dict | None:
        """What `save_frozen` was given; None for a run without frozen values of its own."""
        if not self._frozen.all_steps():
            return None
        arguments = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self._frozen.restore(0, args=arguments).meta

    def restore_frozen(self, target: Params) -> Params:
        """The values of `save_frozen`, placed as the abstract `target` says.

        Raises:
          UserError: they are damaged.
        """
        return self._use("frozen", self._frozen, 0, {"frozen": target})[0]["frozen"]

    def restore(self, target: Any, say: Any = print) -> tuple[Any, dict]:
        """Arrays and metadata of the newest intact checkpoint, with the shardings of the abstract `target`.

        Damaged newer checkpoints are moved aside and reported through `say`.

        Raises:
          UserError: no checkpoint is intact.
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
            # Not before one could be read: the fault may lie elsewhere.
            for newer, reason in damaged.items():
                self._set_aside(newer)
                say(f"checkpoint {newer} is damaged ({reason}); set aside, going back to {step}")
            return result
        reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
        raise UserError(
            f"no intact checkpoint in {self._directory} ({reasons}); remove the workdir to start anew"
        )

    def restore_best(self, target: Any, step: int | None = None) -> tuple[Any, dict]:
        """Arrays and metadata of the best checkpoint by the validation objective, or of that of `step`.

        Raises:
          UserError: the checkpoint is missing or damaged.
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
        """Arrays and metadata of one of the checkpoints of `top`.

        Raises:
          UserError: the checkpoint is damaged.
        """
        return self._use("top", self._top, step, target)

    def restore_snapshot(self, target: Any, step: int) -> tuple[Any, dict]:
        """Arrays and metadata of the snapshot of `step`.

        Raises:
          UserError: the snapshot is missing or damaged.
        """
        check_snapshot(self._directory.parent, step)
        return self._use("snapshot", self._snapshots, step, target)

    def _use(
        self, what: str, manager: ocp.CheckpointManager, step: int, target: Any
    ) -> tuple[Any, dict]:
        """Reads one checkpoint, without falling back on an older one."""
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
        target = _in_checkpoint(target, _tree(manager.directory / str(step)))
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
        """The managers in use, that of the newest checkpoints first."""
        managers = [self._latest, self._best, self._frozen]
        return managers + [
            vars(self)[name] for name in ("_top", "_snapshots") if name in vars(self)
        ]

    def wait(self) -> None:
        """Waits until all saved checkpoints are on disk."""
        for manager in self._open:
            manager.wait_until_finished()

    def close(self) -> None:
        for manager in self._open:
            manager.close()


def snapshots(workdir: Path) -> list[int]:
    """Steps of the snapshots of a run, ascending."""
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
    """Names the arrays that are missing from a checkpoint or from `target`, or differ in shape; "" for none."""
    try:
        tree = _tree(path)
    except Exception:  # orbax and its storage raise whatever a damaged file provokes
        return ""
    there, here = (
        {n: x.shape for part in parts.values() for n, x in part.items()}
        for parts in (tree, _in_checkpoint(target, tree))
    )
    found = [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return ", ".join(found[:2]) + more


def _tree(path: Path) -> dict[str, dict[str, Any]]:
    """Names and shapes of the arrays of a checkpoint, by part."""
    with ocp.StandardCheckpointer() as reader:
        return reader.metadata(path / "state").item_metadata.tree


def _in_checkpoint(target: dict[str, Any], tree: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The target without those frozen values that the checkpoint leaves to the folder of frozen values."""
    frozen = {name: x for name, x in target["frozen"].items() if name in tree["frozen"]}
    return {**target, "frozen": frozen}


def abstract(some: Mapping[str, Any], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Abstract arrays for these variables, with their shardings."""
    where = shardings(some, mesh)
    return {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where[n]) for n, v in some.items()}
