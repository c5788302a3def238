"""Writes and reads the checkpoints of a run.

A checkpoint has a JSON part, `meta` (`Run.metadata` and a checksum), the dictionaries {path: array} "trainable" and
"frozen" and, only if its kind (see `Checkpoints`) is "latest", the optimizer state "optimizer". A run writes its frozen
values, except pretrained weights, once, to a checkpoint of the kind "frozen", which has only "frozen" and its own
`meta`. In all other checkpoints, "frozen" is empty, unless the run is from before commit 939e222.
"""

import itertools
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

from common.errors import UserError, check, file_error, parse_json, reason_of
from common.runtime.processes import all_gather, all_or_none, barrier, gather, is_main
from common.sharding import abstract
from common.storage.addresses import address, shown
from common.storage.folders import open_folder
from common.train.workdir import lock_word
from common.variables import AbstractModel


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
"""Kind of the checkpoints that a run saves every `checkpoint.snapshots` steps and never deletes."""


def unless_failing(barrier: Callable[..., None]) -> Callable[..., None]:
    """Wraps orbax's barrier: a thread that is handling an exception raises the exception again instead of waiting.

    Without this wrapper, a process that fails to write its part of a checkpoint would wait at a different barrier
    than all other processes, until orbax's timeout of twenty minutes.
    """

    def wait(**arguments: Any) -> None:
        if error := sys.exc_info()[1]:
            raise error
        barrier(**arguments)

    return wait


class _KeepBest(PreservationPolicy):
    """Decides which "best" checkpoints orbax keeps.

    These are the two newest "best" checkpoints and, for each "latest" checkpoint, the newest "best" checkpoint that is
    not from a later step. A run that resumes from a "latest" checkpoint thus still has the checkpoint that was the best
    at that step.
    """

    def __init__(self, latest: ocp.CheckpointManager):
        self._latest = latest

    def should_preserve(self, checkpoints: Sequence[Any], **_: Any) -> list[bool]:
        steps = sorted(checkpoint.step for checkpoint in checkpoints)
        before = [[step for step in steps if step <= end] for end in self._latest.all_steps()]
        kept = {*steps[-2:], *(some[-1] for some in before if some)}
        return [checkpoint.step in kept for checkpoint in checkpoints]


class DamagedCheckpoint(UserError):
    """Raised for a checkpoint whose files are missing or damaged. `fault` is the message without its remedy."""

    def __init__(self, fault: str):
        super().__init__(f"{fault}: restore its files, or train again in another folder")
        self.fault = fault


class Checkpoints:
    """The checkpoints of a workdir, with a folder for each kind. All processes must call every method.

    Kinds are "latest" (to resume from), "best" (steps with a new best validation objective; `_KeepBest` decides which
    are kept), "top" (the `keep_best` steps with the best objectives), "snapshots" (permanent) and "frozen" (the frozen
    values).

    If a run of several processes is in a bucket, and the processes do not share their local copy of the workdir, then
    process 0 gathers the arrays and writes the checkpoints, and `share` copies them to all other processes.
    """

    def __init__(
        self,
        workdir: Path,
        keep: int = 2,
        keep_best: int | None = None,
        upload: Callable[[], None] | None = None,
    ):
        """Opens the checkpoints of `workdir`. Silences the logger "absl" in the whole process, because orbax uses it.

        Args:
          keep: number of "latest" checkpoints to keep.
          keep_best: number of "top" checkpoints to keep; None if the caller only reads checkpoints.
          upload: function that uploads the workdir to its bucket, called by `share` on process 0.
        """
        self.directory = workdir.absolute() / "checkpoints"
        self._copies, self._leads, self._upload = False, True, upload
        if address(workdir) and jax.process_count() > 1:
            from common.storage.mirror import roles

            self._copies, self._leads = roles(lock_word(workdir))
        self._keep_best = keep_best
        # Orbax also logs faults from which it recovers.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._managers: dict[str, ocp.CheckpointManager] = {}
        latest = self._open("latest", max_to_keep=keep)
        self._open("best", preservation_policy=_KeepBest(latest))
        self._open("frozen", max_to_keep=1)

    def _manager(self, kind: str) -> ocp.CheckpointManager:
        if kind in self._managers:
            return self._managers[kind]
        best = {"max_to_keep": self._keep_best, "best_fn": lambda metrics: metrics["score"]}
        return self._open(kind, **(best if kind == "top" else {}))

    def _open(self, kind: str, **options: Any) -> ocp.CheckpointManager:
        # Threads of several managers, also of several runs (`turns`), wait at barriers at the same time. The prefix
        # gives each manager its own barriers. The prefix contains the name of the workdir instead of its path, because
        # the path may differ between hosts.
        prefix = f"{self.directory.parent.name}/{kind}"
        hosts = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=prefix)
        if self._copies:  # orbax must not wait for other processes
            me = jax.process_index()
            hosts = ocp.options.MultiprocessingOptions(
                primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"{prefix}{me}"
            )
            options["create"] = False  # Orbax cannot create folders with `active_processes`.
            (self.directory / kind).mkdir(parents=True, exist_ok=True)
        wait = unless_failing(ocp.multihost.get_barrier_sync_fn(processes=hosts.active_processes))
        options = ocp.CheckpointManagerOptions(
            multiprocessing_options=hosts,
            async_options=ocp.AsyncOptions(barrier_sync_fn=wait),
            **options,
        )
        self._managers[kind] = ocp.CheckpointManager(self.directory / kind, options=options)
        return self._managers[kind]

    def steps(self) -> list[int]:
        """Returns the steps of the "latest" checkpoints that at least one process finds, ascending."""
        return sorted(set(itertools.chain(*all_gather([*self._managers["latest"].all_steps()]))))

    def save(self, step: int, state: Any, meta: dict) -> None:
        """Starts writing a "latest" checkpoint. The caller may donate the arrays after this method returns.

        First waits until the checkpoints of all other kinds are on disk, because a run that resumes from this
        checkpoint does not save earlier best checkpoints and snapshots again.
        """
        for kind, manager in self._managers.items():
            if kind != "latest":
                manager.wait_until_finished()
        self.save_as("latest", step, state, meta)

    def save_top(self, step: int, state: Any, meta: dict, score: float) -> None:
        """Starts writing a "top" checkpoint if `score` is among the `keep_best` largest scores.

        If there are then more than `keep_best` "top" checkpoints, deletes the checkpoint with the smallest score.
        """
        kept = self.top()
        if len(kept) < self._keep_best or score > min(kept.values()):
            self.save_as("top", step, state, meta, metrics={"score": score})

    def top(self) -> dict[int, float]:
        """Returns {step: score} of the checkpoints that `save_top` has kept, largest score first.

        Returns at most `keep_best` checkpoints: more may be on disk after a resume with a smaller `keep_best`.
        """
        manager = self._manager("top")
        manager.wait_until_finished()  # because the scores are read from disk
        # Only process 0 reads: the lists of other processes may have checkpoints that process 0 has deleted.
        steps = manager.all_steps() if is_main() else ()
        found = [(step, manager.metrics(step)["score"]) for step in steps]
        best = sorted(found, key=lambda one: one[1], reverse=True)[: self._keep_best]
        return dict(all_gather(best)[0])

    def discard_best(self, known: Collection[int]) -> None:
        """Deletes "best" and "top" checkpoints at steps not in `known`."""
        # The manager of "top" would create the folder "top", so open it only if process 0 finds this folder.
        top = all_gather((self.directory / "top").exists())[0]
        for kind in ("best", "top") if top else ("best",):
            self._delete(kind, lambda step: step not in known)

    def _delete(self, kind: str, chosen: Callable[[int], bool]) -> None:
        # Other processes must not list the folder while its leader (`mirror.roles`) deletes.
        if self._leads:
            for step in filter(chosen, sorted(self._manager(kind).all_steps())):
                self._manager(kind).delete(step)
        if self._copies:
            barrier(f"deleted {kind}")
            self._manager(kind).reload()

    def save_as(self, kind: str, step: int, state: Any, meta: dict, **options: Any) -> None:
        """Starts writing a checkpoint of a kind, if the step has no checkpoint of this kind.

        `options` are further arguments of orbax's `CheckpointManager.save`.
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
        parts = {"state": ocp.args.StandardSave(state), "meta": ocp.args.JsonSave(meta)}
        manager.save(step, args=ocp.args.Composite(**parts), force=True, **options)

    def replace(self, kind: str, step: int, state: Any, meta: dict) -> None:
        """Deletes the checkpoint of a kind and step, if it exists, and starts writing it again."""
        self._delete(kind, lambda other: other == step)
        self.save_as(kind, step, state, meta)

    def frozen_metadata(self) -> dict | None:
        """Returns the `meta` of the checkpoint "frozen"; None if the run has saved no frozen values.

        Raises a UserError if the stored `meta` is unreadable or damaged.
        """
        folder = self.directory / "frozen" / "0"
        try:
            return _meta(folder) if self._managers["frozen"].all_steps() else None
        except (OSError, ValueError) as error:
            raise file_error(shown(folder / "meta" / "metadata"), error) from error

    def restore_best(self, target: Any) -> tuple[Any, dict]:
        """Returns arrays and `meta` of the newest "best" checkpoint; `target` as in `read`.

        Raises a UserError if there is no "best" checkpoint or `restore_from` fails.
        """
        steps = self._managers["best"].all_steps()
        check(
            bool(steps),
            f"no best checkpoint in {shown(self.directory / 'best')}: the run has no evaluation with a finite value"
            " yet, or the checkpoint was removed; restore the files, or delete summary.json and resume the run",
        )
        return self.restore_from("best", max(steps), target)

    def restore_from(self, kind: str, step: int, target: Any) -> tuple[Any, dict]:
        """Returns arrays and `meta` of a checkpoint; `target` as in `read`.

        Raises a DamagedCheckpoint if the checkpoint cannot be read, and a UserError if it does not fit into memory or
        does not match the model.
        """
        try:
            return self.read(kind, step, target)
        except UserError:
            raise
        except Exception as error:
            path, what = self.directory / kind / str(step), kind.removesuffix("s")
            raise DamagedCheckpoint(
                f"the {what} checkpoint, {shown(path)}, cannot be read ({reason_of(error)})"
            ) from error

    def restore_mean(self, kind: str, steps: Sequence[int], target: Any) -> tuple[Any, dict]:
        """Averages the "trainable" arrays of several checkpoints of a kind; otherwise like `restore_from`.

        "frozen" and `meta` are from the last checkpoint in `steps`.
        """
        mean: dict | None = None
        for step in steps:
            arrays, meta = self.restore_from(kind, step, target)
            share = jax.tree.map(lambda x: x / len(steps), arrays["trainable"])
            mean = share if mean is None else jax.tree.map(jnp.add, mean, share)
        return {"trainable": mean, "frozen": arrays["frozen"]}, meta

    def read(self, kind: str, step: int, target: Any) -> tuple[Any, dict]:
        """Returns arrays and `meta` of a checkpoint. Omits frozen values that the checkpoint does not contain.

        `target`, a tree of abstract arrays (see `model_arrays`), has the arrays to read and their shardings.

        Raises, on all processes, a UserError if the arrays do not fit into memory, or if the parameters differ in name
        or shape from `target`. Raises an exception of any type if reading fails otherwise or the checksum is wrong.
        """
        # `CheckpointManager.restore` ends with a barrier, at which processes that have read the checkpoint would wait
        # for a process that has failed. So use orbax's handler, which has no barrier.
        path, what = self.directory / kind / str(step), kind.removesuffix("s")

        def read() -> tuple[Any, dict]:
            with closing(ocp.StandardCheckpointHandler()) as handler:
                arguments = ocp.args.StandardRestore(_in_checkpoint(target, _tree(path)))
                return handler.restore(path / "state", args=arguments), _meta(path)

        def verify() -> None:
            if int(checksum(state)) != meta["checksum"]:
                raise ValueError("the checksum does not match the content")

        try:
            state, meta = all_or_none(read)
            all_or_none(verify)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error) and "memory" in str(error).lower():
                raise UserError(
                    f"the checkpoint {shown(path)} does not fit into the memory of the devices ({reason_of(error)}):"
                    " free memory, or use more devices"
                ) from error
            differences = _differences(path, target)
            check(
                not differences,
                f"the {what} checkpoint, {shown(path)}, does not match the model: {differences}; restore the run's"
                " config.json and the code of its model, or train again in another folder",
            )
            raise
        return state, meta

    def share(self) -> None:
        """Copies the checkpoints of process 0 through the bucket to all other processes.

        Does nothing unless the processes have different local copies of the workdir.
        """
        if not self._copies:
            return
        self.wait()
        if is_main():
            self._upload()
        barrier("checkpoints are uploaded")
        if self._leads and not is_main():
            open_folder(str(self.directory.parent))
        barrier("checkpoints are downloaded")
        self.reload()

    def reload(self) -> None:
        """Lists the checkpoints on disk again, after files were moved, deleted or downloaded."""
        for manager in self._managers.values():
            manager.reload()

    def wait(self) -> None:
        """Waits until all saved checkpoints are on disk."""
        for manager in self._managers.values():
            manager.wait_until_finished()

    def close(self) -> None:
        for manager in self._managers.values():
            manager.close()


def _differences(path: Path, target: Any) -> str:
    """Names up to two arrays that a checkpoint or `target` lacks or whose shapes differ, and counts the rest.

    Returns "" if no array differs, or if the checkpoint is unreadable.
    """
    try:
        tree = _tree(path)
    except Exception:  # Orbax may raise any type of exception for a damaged file.
        return ""
    stored, expected = (
        {n: x.shape for part in ("trainable", "frozen") for n, x in parts.get(part, {}).items()}
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
    return parse_json((path / "meta" / "metadata").read_text())


def _tree(path: Path) -> dict[str, dict[str, Any]]:
    """Returns {part: tree of shapes and dtypes} of a checkpoint. May raise any exception if the files are damaged."""
    with ocp.StandardCheckpointer() as reader:
        found = reader.metadata(path / "state").item_metadata
        if found is None:
            raise ValueError("the list of the arrays in the checkpoint is missing or damaged")
        return found.tree


def _in_checkpoint(target: dict[str, Any], tree: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns `target` without the frozen values that the checkpoint does not contain."""
    frozen = {name: x for name, x in target["frozen"].items() if name in tree["frozen"]}
    return {**target, "frozen": frozen}


def model_arrays(model: AbstractModel, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Returns the `target` to read a checkpoint without its optimizer state: abstract trainable and frozen values."""
    return {"trainable": abstract(model.trainable, mesh), "frozen": abstract(model.frozen, mesh)}
