"""Checkpoints of a run: the latest (to resume), the best (for evaluation or averaging), and permanent snapshots.

A checkpoint has a JSON part, `meta` (`common.train.run_state`), and arrays: "trainable", "frozen" and, in the latest
checkpoints only, "optimizer". "frozen" is empty, because a run writes its frozen values once, to a checkpoint of their
own (`save_frozen`). Checkpoints from before 939e222 (22 November 2026) may have frozen values in "frozen".
"""

import itertools
import json
import logging
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from common.errors import UserError, check, reason_of
from common.runtime.processes import all_gather, all_or_none, barrier, gather, is_main, warn
from common.sharding import abstract
from common.storage.addresses import address, shown
from common.storage.folders import open_folder
from common.variables import AbstractModel, Params


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """Reads the bits of each element as an unsigned integer; returns the sum over all elements modulo 2^32.

    The checksum does not depend on the sharding. A single flipped bit changes the checksum.
    """

    def sum_bits(x: jax.Array) -> jax.Array:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32))

    return sum((sum_bits(leaf) for leaf in jax.tree.leaves(tree)), jnp.uint32(0))


SNAPSHOTS = "snapshots"
"""Folder, and kind, of the checkpoints that are never deleted."""


def unless_failing(barrier: Callable[..., None]) -> Callable[..., None]:
    """Wraps orbax's barrier: a thread that is handling an exception raises the exception again instead of waiting.

    Without this wrapper, a process that fails to write its part of a checkpoint would wait at another barrier than all
    other processes, until orbax's timeout of twenty minutes.
    """

    def wait(**arguments: Any) -> None:
        if error := sys.exc_info()[1]:
            raise error
        barrier(**arguments)

    return wait


class _KeepBest(PreservationPolicy):
    """Keeps two kinds of best checkpoints: the two newest, and the newest up to each checkpoint to resume from.

    A killed run resumes from an earlier step, at which an earlier checkpoint was the best.
    """

    def __init__(self, latest: ocp.CheckpointManager):
        self._latest = latest

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> list[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        before = [[step for step in steps if step <= end] for end in self._latest.all_steps()]
        kept = {*steps[-2:], *(some[-1] for some in before if some)}
        return [checkpoint.step in kept for checkpoint in checkpoints]


class Checkpoints:
    """The checkpoints of a workdir, in a folder for each kind: "latest", "best", "top", "snapshots" and "frozen".

    Every method is collective: all processes must call it. Only the property `exist` is local.

    If the run is in a bucket, each process has its own copy of the workdir. Process 0 then gathers the arrays and
    writes the checkpoints, and `share` copies the checkpoints to all other processes.
    """

    def __init__(
        self,
        workdir: Path,
        keep: int = 2,
        keep_best: int | None = None,
        upload: Callable[[], None] = lambda: None,
    ):
        """Opens the checkpoints of `workdir`.

        Args:
          keep: number of latest checkpoints to keep.
          keep_best: number of "top" checkpoints to keep (`save_top`); None if the caller saves no checkpoints.
          upload: function that uploads the workdir to its bucket, called by `share`.
        """
        self._directory = workdir.absolute() / "checkpoints"
        self._copies, self._upload = bool(address(workdir)) and jax.process_count() > 1, upload
        self._keep_best = keep_best
        # Silence orbax, which also logs faults from which orbax recovers. This class reports all other faults.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._managers: dict[str, ocp.CheckpointManager] = {}
        latest = self._open("latest", max_to_keep=keep)
        self._open("best", preservation_policy=_KeepBest(latest))
        self._open("frozen", max_to_keep=1)

    def _manager(self, kind: str) -> ocp.CheckpointManager:
        """Returns orbax's manager of a kind of checkpoints. Opens "top" and "snapshots" at the first call."""
        if kind in self._managers:
            return self._managers[kind]
        best = {"max_to_keep": self._keep_best, "best_fn": lambda metrics: metrics["score"]}
        return self._open(kind, **(best if kind == "top" else {}))

    def _open(self, kind: str, **options: Any) -> ocp.CheckpointManager:
        # Threads of several managers, also of several runs (`turns`), wait at barriers at the same time. The prefix
        # gives each manager its own barriers. The prefix contains the name of the workdir instead of its path, because
        # the path may differ between hosts.
        prefix = f"{self._directory.parent.name}/{kind}"
        hosts = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=prefix)
        if self._copies:  # each process manages its own copy of the folder
            me = jax.process_index()
            hosts = ocp.options.MultiprocessingOptions(
                primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"{prefix}{me}"
            )
            options["create"] = False  # Orbax cannot create folders with `active_processes`.
            (self._directory / kind).mkdir(parents=True, exist_ok=True)
        wait = unless_failing(ocp.multihost.get_barrier_sync_fn(processes=hosts.active_processes))
        options = ocp.CheckpointManagerOptions(
            multiprocessing_options=hosts,
            async_options=ocp.AsyncOptions(barrier_sync_fn=wait),
            **options,
        )
        self._managers[kind] = ocp.CheckpointManager(self._directory / kind, options=options)
        return self._managers[kind]

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints to resume from, ascending. At least one process has found each step."""
        return sorted(set(itertools.chain(*all_gather([*self._managers["latest"].all_steps()]))))

    @property
    def exist(self) -> bool:
        """Whether this process finds a checkpoint to resume from."""
        return bool(self._managers["latest"].all_steps())

    def save(self, step: int, state: Any, meta: dict) -> None:
        """Starts writing a checkpoint to resume from. The caller may donate the arrays after this method returns.

        First waits until the checkpoints of all other kinds are on disk, because a run that resumes from this
        checkpoint does not save earlier best checkpoints and snapshots again.
        """
        for kind, manager in self._managers.items():
            if kind != "latest":
                manager.wait_until_finished()
        self.save_as("latest", step, state, meta)

    def save_top(self, step: int, state: Any, meta: dict, score: float) -> None:
        """Saves a checkpoint if `score` is among the `keep_best` largest scores.

        Deletes the checkpoint with the lowest score if there are more than `keep_best` checkpoints.
        """
        kept = self._scores()
        if len(kept) < self._keep_best or score > kept[-1][1]:
            self.save_as("top", step, state, meta, metrics={"score": score})

    def top(self) -> list[int]:
        """Returns the steps of the checkpoints that `save_top` has kept, best first."""
        return [step for step, _ in self._scores()]

    def _scores(self) -> list[tuple[int, float]]:
        """Returns step and score of the checkpoints that `save_top` keeps, best first."""
        manager = self._manager("top")
        manager.wait_until_finished()  # the scores are read from disk
        found = [(step, manager.metrics(step)["score"]) for step in manager.all_steps()]
        found = sorted(found, key=lambda one: one[1], reverse=True)
        return all_gather(found)[0] if self._copies else found

    def discard_best(self, known: Collection[int]) -> None:
        """Deletes the checkpoints of the kinds "best" and "top" at steps that are not in `known`."""
        for kind in ("best", "top") if self._keep_best > 1 else ("best",):
            manager = self._manager(kind)
            for step in sorted(set(manager.all_steps()) - set(known)):
                manager.delete(step)

    def save_as(self, kind: str, step: int, state: Any, meta: dict, **options: Any) -> None:
        """Starts writing a checkpoint of a kind, if the step has no checkpoint of this kind.

        Args:
          options: further arguments of orbax's `CheckpointManager.save`.
        """
        manager = self._manager(kind)
        saved = step in manager.all_steps()
        if all_gather(saved)[0] if self._copies else saved:
            return
        meta = {**meta, "checksum": int(checksum(state))}
        if self._copies:
            state = jax.tree.map(gather, state)
            if not is_main():
                return
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
        )
        manager.save(step, args=arguments, force=True, **options)

    def save_frozen(self, values: Params, meta: dict) -> None:
        """Writes the frozen values of a run.

        Overwrites the frozen values of an earlier attempt that was killed before its first checkpoint.
        """
        if self._managers["frozen"].all_steps():
            self._managers["frozen"].delete(0)
        self.save_as("frozen", 0, {"frozen": values}, meta)

    def frozen_metadata(self) -> dict | None:
        """Returns the `meta` that `save_frozen` has stored; None if the run has saved no frozen values."""
        manager = self._managers["frozen"]
        return _meta(manager.directory / "0") if manager.all_steps() else None

    def restore(self, target: Any) -> tuple[Any, dict]:
        """Returns arrays and `meta` of the newest intact checkpoint, with the shardings of the abstract `target`.

        A checkpoint is intact if every process can read it, so all processes resume from the same step. Moves damaged
        newer checkpoints to the folder "damaged", with a warning for each.

        Raises:
          UserError: no checkpoint is intact.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                result = self._read("latest", step, target)
            # Orbax and its storage library may raise any type of exception for a damaged file.
            except Exception as error:
                damaged[step] = reason_of(error)
                continue
            # Move damaged checkpoints only if an older checkpoint is readable: otherwise the storage may have failed.
            for newer, reason in damaged.items():
                self._set_aside(newer)
                warn(
                    f"the checkpoint of step {newer} is damaged ({reason}): moved to"
                    f" {shown(self._directory / 'damaged')}, resuming from step {step}"
                )
            return result
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise UserError(
            f"no intact checkpoint in {shown(self._directory)} ({reasons}): restore the files, or choose another"
            " --workdir to start again"
        )

    def restore_best(self, target: Any, step: int | None = None) -> tuple[Any, dict]:
        """Returns arrays and `meta` of the checkpoint that is best by the validation objective.

        Args:
          step: step of an earlier best checkpoint that `_KeepBest` has kept; None for the newest best checkpoint.

        Raises:
          UserError: the checkpoint is missing, is damaged, or belongs to another model.
        """
        steps = self._managers["best"].all_steps()
        chosen = max(steps, default=None) if step is None else step
        if chosen not in steps:
            raise UserError(
                f"no best checkpoint{'' if step is None else f' of step {step}'} in {shown(self._directory / 'best')}:"
                " the run has no evaluation with a finite value yet, or the checkpoint was removed; resume the run, or"
                " restore the files"
            )
        return self.restore_from("best", chosen, target)

    def restore_from(self, kind: str, step: int, target: Any) -> tuple[Any, dict]:
        """Returns arrays and `meta` of the checkpoint of a kind at `step`, which must exist.

        Raises:
          UserError: the checkpoint is damaged, or belongs to another model.
        """
        try:
            return self._read(kind, step, target)
        except Exception as error:
            path, what = self._directory / kind / str(step), kind.removesuffix("s")
            if differences := _differences(path, target):
                raise UserError(
                    f"the {what} checkpoint, {shown(path)}, does not match the configuration of its run: {differences};"
                    " restore the run's config.json, or train again in another folder"
                ) from error
            raise UserError(
                f"the {what} checkpoint, {shown(path)}, is damaged ({reason_of(error)}): restore its files, or train"
                " again in another folder"
            ) from error

    def restore_mean(self, kind: str, steps: Sequence[int], target: Any) -> tuple[Any, dict]:
        """Averages the trained values of the checkpoints of a kind at `steps`; see `restore_from`.

        Returns:
          (arrays, meta). "trainable" in `arrays` holds the averages. "frozen" and `meta` are from the last checkpoint.
        """
        mean: dict | None = None
        for step in steps:
            arrays, meta = self.restore_from(kind, step, target)
            share = jax.tree.map(lambda x: x / len(steps), arrays["trainable"])
            mean = share if mean is None else jax.tree.map(jnp.add, mean, share)
        return {"trainable": mean, "frozen": arrays["frozen"]}, meta

    def _read(self, kind: str, step: int, target: Any) -> tuple[Any, dict]:
        """Returns arrays and `meta` of a checkpoint. Raises on all processes if one process cannot read the checkpoint.

        Calls orbax's handler instead of `manager.restore`, because the latter ends with a barrier. At this barrier,
        processes that have read the checkpoint would wait for a process that has failed.
        """
        path = self._directory / kind / str(step)

        def read() -> tuple[Any, dict]:
            with closing(ocp.StandardCheckpointHandler()) as handler:
                arguments = ocp.args.StandardRestore(_in_checkpoint(target, _tree(path)))
                return handler.restore(path / "state", args=arguments), _meta(path)

        def verify() -> None:
            if int(checksum(state)) != meta["checksum"]:
                raise ValueError("the checksum does not match the content")

        state, meta = all_or_none(read)
        all_or_none(verify)
        return state, meta

    def _set_aside(self, step: int) -> None:
        if is_main():
            damaged = self._directory / "damaged"
            damaged.mkdir(exist_ok=True)
            paths = (damaged / f"{step}.{n}" for n in itertools.count())
            target = next(path for path in paths if not path.exists())
            (self._directory / "latest" / str(step)).rename(target)
        barrier(f"set aside {step}")
        self._managers["latest"].reload()

    def share(self) -> None:
        """Copies the checkpoints of process 0 to all other processes, unless all processes share one workdir."""
        if not self._copies:
            return
        self.wait()
        if is_main():
            self._upload()
        barrier("checkpoints are uploaded")
        if not is_main():
            open_folder(str(self._directory.parent))
            for manager in self._managers.values():
                manager.reload()
        barrier("checkpoints are downloaded")

    def wait(self) -> None:
        """Waits until all saved checkpoints are on disk."""
        for manager in self._managers.values():
            manager.wait_until_finished()

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()


def snapshots(workdir: Path) -> list[int]:
    """Returns the steps of a run's snapshots, ascending."""
    paths = (workdir / "checkpoints" / SNAPSHOTS).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def check_snapshot(workdir: Path, step: int) -> None:
    """Raises a UserError if the run has no snapshot at `step`."""
    existing = snapshots(workdir)
    steps = ", ".join(map(str, existing)) or "none"
    check(
        step in existing,
        f"no snapshot of step {step} in {shown(workdir / 'checkpoints' / SNAPSHOTS)}; snapshots of steps: {steps}"
        " (training with --config.checkpoint.snapshots=N saves a snapshot every N steps)",
    )


def _differences(path: Path, target: Any) -> str:
    """Describes how the arrays of a checkpoint differ from `target`: missing arrays and different shapes.

    Names the first two arrays and counts the rest. Returns "" if no array differs, or if the checkpoint is unreadable.
    """
    try:
        tree = _tree(path)
    except Exception:  # Orbax may raise any type of exception for a damaged file.
        return ""
    stored, expected = (
        {n: x.shape for part in parts.values() for n, x in part.items()}
        for parts in (tree, _in_checkpoint(target, tree))
    )
    lines = [
        f"the array {name} is {stored.get(name, 'missing')} in the checkpoint, {expected.get(name, 'missing')} in the"
        " model"
        for name in sorted(stored.keys() | expected.keys())
        if stored.get(name) != expected.get(name)
    ]
    more = f" and {len(lines) - 2} more" if len(lines) > 2 else ""
    return ", ".join(lines[:2]) + more


def _meta(path: Path) -> dict[str, Any]:
    """Returns the JSON part of a checkpoint."""
    return json.loads((path / "meta" / "metadata").read_text())


def _tree(path: Path) -> dict[str, dict[str, Any]]:
    """Returns {part: {name: shape and dtype}} of a checkpoint. Parts are "trainable", "optimizer" and "frozen"."""
    with ocp.StandardCheckpointer() as reader:
        return reader.metadata(path / "state").item_metadata.tree


def _in_checkpoint(target: dict[str, Any], tree: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns `target` without the frozen values that the checkpoint does not contain."""
    frozen = {name: x for name, x in target["frozen"].items() if name in tree["frozen"]}
    return {**target, "frozen": frozen}


def model_arrays(model: AbstractModel, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns the `target` of a checkpoint without optimizer state: abstract trainable and frozen values."""
    return {"trainable": abstract(model.trainable, mesh), "frozen": abstract(model.frozen, mesh)}
