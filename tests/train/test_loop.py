"""The training loop on the toy task: resuming, evaluation, checkpoints, early stopping and limits."""

import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from common import freezing, variables
from common.errors import Preempted, UserError
from common.metrics.kinds import load
from common.metrics.losses import Losses
from common.metrics.predictions import PREDICTIONS
from common.model.linear import Linear
from common.report.curve_plot import plot_curve
from common.runtime import processes
from common.track.tracker import read_metrics
from common.train import agreement, ahead, checkpoint, frozen, resume, run
from common.train import task as tasks
from common.train.checkpoint import Checkpoints
from common.train.state import Step
from common.train.task import Task
from common.train.workdir import lock_workdir
from tests.train import toy


def losses(workdir: Path) -> list[tuple[int, float]]:
    return [(m["step"], m["train/loss"]) for m in read_metrics(workdir) if "train/loss" in m]


def latest(workdir: Path) -> Path:
    steps = (workdir / "checkpoints" / "latest").iterdir()
    return max((p for p in steps if p.name.isdigit()), key=lambda p: int(p.name))


def test_training_lowers_the_error_and_writes_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Draw the curve. In other tests, a fixture in tests/conftest.py copies an earlier curve, which is faster.
    monkeypatch.setattr("common.train.summary.plot_curve", plot_curve)
    summary = toy.run(tmp_path, train__steps=200, eval__steps=50)
    assert summary["best_valid"] < 0.05 < abs(losses(tmp_path)[0][1])
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["params"] == {"trainable": 5, "frozen": 12, "total": 17}
    assert [p["step"] for p in summary["curve"]["points"]] == [50, 100, 150, 200]
    assert summary["steps"] == 200 and summary["stopped_by"] == "steps"
    # The products 8 x 2 x 4 and 8 x 4 x 1, and the weight gradient of the second layer: the first layer is frozen.
    frozen, trained = 2 * 8 * 2 * 4, 2 * 8 * 4 * 1
    assert summary["flops"] == 200 * (frozen + 2 * trained)
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert {
        "train_seconds",
        "compile_seconds",
        "eval_seconds",
        "checkpoint_seconds",
    } <= summary.keys()


@pytest.mark.medium
def test_warm_start_is_evaluated_before_training_and_computed_once(tmp_path: Path) -> None:
    class Warm(toy.Toy):
        started = 0

        def start(self, trainable, frozen):
            self.started += 1
            return jax.tree.map(jax.numpy.zeros_like, trainable)

    task = Warm()
    summary = toy.run(tmp_path, task, eval__start=True)
    first = summary["curve"]["points"][0]
    assert first["step"] == 0 and first["seconds"] == first["flops"] == 0
    assert first["value"] == 3, "the model of zeros predicts 0, the target is 3"
    assert summary["start_seconds"] > 0
    task = Warm()
    longer = toy.run(tmp_path, task, eval__start=True, train__steps=25)
    assert task.started == 0
    assert [p["step"] for p in longer["curve"]["points"]] == [0, 5, 10, 15, 20, 25]


def test_run_of_zero_steps_needs_an_initial_evaluation(tmp_path: Path) -> None:
    summary = toy.run(tmp_path, eval__start=True, train__steps=0)
    assert summary["steps"] == 0 and summary["stopped_by"] == "steps"
    assert summary["test"]["error"] == summary["best_valid"]
    with pytest.raises(UserError, match=r"eval\.start"):
        toy.run(tmp_path / "other", train__steps=0)


def test_loss_function_of_a_step_is_chosen_once(tmp_path: Path) -> None:
    """`loss_at` may be costly, for example if it draws random numbers. The run calls it once for each step.

    The run calls it again to compile a step; here, only step 0 is compiled.
    """
    chosen = []

    class Choosing(toy.Toy):
        def loss_at(self, step):
            chosen.append(step)
            return self.loss

    toy.run(tmp_path, Choosing())
    compiled, *later = range(20)
    assert [step for step in chosen if step != compiled] == later


class Buckets(toy.Toy):
    """The toy task with three batches of 8 rows, then batches of 4 rows.

    Args:
      ahead: whether to compile both shapes ahead.
    """

    def __init__(self, ahead: bool = True):
        super().__init__()
        self.ahead = ahead

    def batches(self, start):
        for batch, state in super().batches(start):
            rows = 8 if state["next"] <= 3 else 4
            yield {name: x[:rows] for name, x in batch.items()}, state

    def batch_samples(self):
        batches = (batch for batch, _ in self.batches({"next": 2}))
        return itertools.islice(batches, 2 if self.ahead else 0)


def count_programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each step appends the number of compiled programs."""
    compiled: list[int] = []
    call = Step.__call__

    def spy(step, *arguments):
        compiled.append(len(step.compiled))
        return call(step, *arguments)

    monkeypatch.setattr(Step, "__call__", spy)
    return compiled


def test_all_batch_shapes_are_compiled_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second shape arrives in step 4."""
    compiled = count_programs(monkeypatch)
    toy.run(tmp_path / "ahead", Buckets(), train__steps=5)
    assert compiled == [1, 2, 2, 2, 2]
    toy.run(tmp_path / "later", Buckets(ahead=False), train__steps=5)
    assert compiled[5:] == [1, 1, 1, 2, 2]
    assert losses(tmp_path / "ahead") == losses(tmp_path / "later")


def test_all_loss_functions_are_compiled_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth step needs the second loss function. Both loss functions are compiled for both batch shapes."""
    compiled = count_programs(monkeypatch)

    class Doubled(toy.Toy):
        def doubled(self, model, batch, key):
            loss, weight = self.loss(model, batch, key)
            return 2 * loss, weight

        def loss_at(self, step):
            return self.doubled if step == 3 else self.loss

        def losses(self):
            return self.loss, self.doubled

    class Both(Doubled, Buckets):
        pass

    toy.run(tmp_path / "losses", Doubled(), train__steps=5)
    assert compiled == [1, 2, 2, 2, 2]
    toy.run(tmp_path / "both", Both(), train__steps=5)
    assert compiled[5:] == [1, 4, 4, 4, 4]


def test_steps_of_an_accelerator_do_not_wait_for_other_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits only for the compilation of its own batch shape.

    In this test, the compilation threads start when the second shape arrives.
    """
    started, compile_one = threading.Event(), Step.compile_now
    waited: list[int] = []

    def late(step, *arguments):
        if threading.current_thread() is not threading.main_thread():
            assert started.wait(60)
        compile_one(step, *arguments)

    def compile_or_wait(step, *arguments):
        number = arguments[-1]
        if number == 3:
            waited.append(len(step.compiled))
            started.set()
        return compile_step(step, *arguments)

    compile_step = Step.compile
    monkeypatch.setattr(Step, "compile_now", late)
    monkeypatch.setattr(Step, "compile", compile_or_wait)
    monkeypatch.setattr(ahead, "_wait", lambda *_: None)
    summary = toy.run(tmp_path, Buckets(), train__steps=5)
    assert waited == [1] and summary["steps"] == 5


@pytest.mark.parametrize("waits", [True, False])
def test_error_of_a_thread_that_compiles_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The error is raised on CPUs, which wait for the threads, and on accelerators, when the shape arrives."""
    compile_one = Step.compile_now

    def broken(step, *arguments):
        if threading.current_thread() is not threading.main_thread():
            raise UserError("4 rows")
        compile_one(step, *arguments)

    monkeypatch.setattr(Step, "compile_now", broken)
    if not waits:
        monkeypatch.setattr(ahead, "_wait", lambda *_: time.sleep(1))
    with pytest.raises(UserError, match="4 rows"):
        toy.run(tmp_path, Buckets(), train__steps=5)


def test_signal_ends_the_wait_for_compilations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives while a thread compiles the second shape. This compilation ends after the run."""
    compile_one, end = Step.compile_now, threading.Event()

    def endless(step, *arguments):
        if threading.current_thread() is threading.main_thread():
            return compile_one(step, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        assert end.wait(30)

    monkeypatch.setattr(Step, "compile_now", endless)
    with pytest.raises(Preempted, match="SIGTERM: saved step 1 in"):
        toy.run(tmp_path, Buckets(), train__steps=5)
    end.set()


def test_every_step_is_logged_once(tmp_path: Path) -> None:
    toy.run(tmp_path)
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 21))


def test_resume_with_more_steps_is_bit_exact(tmp_path: Path) -> None:
    toy.run(tmp_path / "once", train__steps=20)
    toy.run(tmp_path / "twice", train__steps=10)
    task = toy.Toy()
    summary = toy.run(tmp_path / "twice", task, train__steps=20)
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    assert task.starts == [{"next": 10}], "the data continue at batch 10"
    assert [p["step"] for p in summary["curve"]["points"]] == [5, 10, 15, 20]


def test_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = toy.run(tmp_path)
    task = toy.Toy()
    again = toy.run(tmp_path, task)
    assert task.starts == [] and task.evaluated == []
    assert again == json.loads(json.dumps(first)), "the summary is reused"
    with pytest.raises(UserError, match=r"eval.sentences \(saved 0, now 3\)"):
        toy.run(
            tmp_path, task, eval__sentences=3
        )  # One curve cannot contain values of two evaluation settings.
    toy.run(tmp_path, task, decode__beams=3)
    assert task.evaluated == ["test"], "a changed decoding field repeats only the test"
    task = toy.Toy()
    (tmp_path / "summary.json").unlink()
    once_more = toy.run(tmp_path, task)
    assert task.evaluated == ["test"]
    assert once_more["curve"] == first["curve"] and once_more["test"] == first["test"]


@pytest.mark.medium
def test_time_limit_holds_after_resume(tmp_path: Path) -> None:
    fields = {"train__steps": 10**6, "train__max_seconds": 0.2, "eval__steps": 10**5}
    first = toy.run(tmp_path, **fields)
    assert first["stopped_by"] == "seconds"
    task = toy.Toy()
    assert toy.run(tmp_path, task, **fields)["steps"] == first["steps"]
    assert task.starts == []
    more = toy.run(tmp_path, **{**fields, "train__max_seconds": first["train_seconds"] + 0.1})
    assert more["steps"] > first["steps"]


@pytest.mark.medium
def test_tested_checkpoint_is_the_best_of_the_curve_not_a_newer_orphan(tmp_path: Path) -> None:
    """If a process is killed after saving a best checkpoint, the restored curve may lack this checkpoint."""
    first = toy.run(tmp_path / "run")
    toy.run(tmp_path / "other", seed=7)
    best = tmp_path / "run" / "checkpoints" / "best"
    other = tmp_path / "other" / "checkpoints" / "best" / "20"
    shutil.copytree(other, best / "25")
    (tmp_path / "run" / "summary.json").unlink()
    again = toy.run(tmp_path / "run")
    assert first["best_step"] == 20 and again["test"] == first["test"]


def test_resumed_run_discards_best_checkpoints_that_its_curve_lacks(tmp_path: Path) -> None:
    """The process was killed after it saved the checkpoints "best" and "top" of step 8, before "latest" of step 8.

    The resumed run does not evaluate at step 8 again.
    """
    fields = {"checkpoint__steps": 4, "checkpoint__keep_best": 2}
    toy.run(tmp_path, toy.Toy(scores=[3.0, 1.0]), train__steps=8, eval__steps=4, **fields)
    shutil.rmtree(latest(tmp_path))
    toy.run(tmp_path, toy.Toy(scores=[5.0]), train__steps=7, eval__steps=3, **fields)
    checkpoints = Checkpoints(tmp_path, keep_best=2)
    model = variables.abstract(toy.Model)
    _, meta = checkpoints.restore_best(checkpoint.model_arrays(model, toy.mesh()))
    assert meta["step"] == 4 and [*checkpoints.top()] == [4, 6]
    checkpoints.close()


def test_best_checkpoint_of_the_latest_checkpoint_is_kept(tmp_path: Path) -> None:
    """The process was killed after it saved best checkpoints at steps 6 and 8. The latest checkpoint is of step 4.

    The resumed run evaluates only at step 7, with a worse value than at step 4.
    """
    improving = toy.Toy(scores=[4.0, 3.0, 2.0, 1.0])
    toy.run(tmp_path, improving, train__steps=8, eval__steps=2, checkpoint__steps=4)
    shutil.rmtree(latest(tmp_path))
    summary = toy.run(
        tmp_path, toy.Toy(scores=[5.0]), train__steps=7, eval__steps=7, checkpoint__steps=4
    )
    assert (summary["best_step"], summary["best_valid"]) == (4, 3.0)
    assert summary["test"]


def test_best_checkpoint_is_on_disk_before_the_checkpoint_that_names_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    state = {"x": jax.numpy.arange(4.0)}
    for step in range(1, 4):
        checkpoints.save_as("best", step, state, {})
        checkpoints.save(step, state, {})
        assert (tmp_path / "checkpoints" / "best" / str(step)).is_dir()
    checkpoints.close()


def test_early_stopping_tests_the_best_checkpoint(tmp_path: Path) -> None:
    task = toy.Toy(scores=[3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    summary = toy.run(tmp_path, task, train__steps=100, eval__patience=2)
    assert summary["stopped_by"] == "patience"
    assert summary["steps"] == 20 and summary["best_step"] == 10
    kept = (p.name for p in (tmp_path / "checkpoints" / "best").iterdir())
    assert sorted(name for name in kept if name.isdigit()) == ["10", "5"]
    assert toy.run(tmp_path, toy.Toy(), train__steps=100, eval__patience=2)["steps"] == 20
    more = toy.run(tmp_path, toy.Toy(scores=[2.0] * 9), train__steps=100, eval__patience=3)
    assert more["steps"] == 25, "a longer patience continues the run"


def test_best_step_is_tested(tmp_path: Path) -> None:
    class Spy(toy.Toy):
        def evaluate(self, values, split):
            seen.append({name: np.asarray(value) for name, value in values.trainable.items()})
            return super().evaluate(values, split)

    seen: list[dict] = []
    toy.run(tmp_path, Spy(scores=[3.0, 1.0, 2.0, 2.0]))
    at_5, at_10, *_, tested = seen
    for name, value in tested.items():
        np.testing.assert_array_equal(value, at_10[name])
        assert (value != at_5[name]).any()


@pytest.mark.medium
def test_task_may_test_the_last_values(tmp_path: Path) -> None:
    """The second evaluation is the best, the fourth is the last."""
    task = toy.Toy(scores=[3.0, 1.0, 2.0, 4.0])
    task.tests_last = True
    summary = toy.run(tmp_path / "both", task)
    true = toy.run(tmp_path / "true")["curve"]["points"]
    assert summary["test"]["error"] == pytest.approx(true[1]["value"])
    assert summary["test_last"]["error"] == pytest.approx(true[3]["value"])
    assert "test_last" not in toy.run(tmp_path / "true")


class Predicting(toy.Toy):
    """Predicts one example, and adds a metric to the metrics of its predictions."""

    objective = "loss"

    def __init__(self):
        super().__init__()
        self.predicted: list[str] = []

    def predict(self, values, split):
        self.predicted.append(split)
        error = np.array([super().evaluate(values, split)["error"]])
        return Losses("examples", error, np.ones(1), np.zeros(0), np.zeros(0), "token")

    def evaluate(self, values, split):
        return {**Task.evaluate(self, values, split), "added": 1.0}


def test_predictions_of_an_own_evaluate_are_not_computed_again(tmp_path: Path) -> None:
    """The predictions that `evaluate` computes are written, and are not computed again."""
    task = Predicting()
    summary = toy.run(tmp_path, task, train__steps=5)
    assert task.predicted == ["valid", "test"]
    metrics = load(tmp_path / PREDICTIONS).metrics()
    assert summary["test"] == {**metrics, "added": 1.0} and set(metrics) == {"loss", "perplexity"}


def test_predictions_that_an_own_evaluate_does_not_compute_are_written(tmp_path: Path) -> None:
    class Alone(Predicting):
        def evaluate(self, values, split):
            return {"loss": 2.0}

    task = Alone()
    assert toy.run(tmp_path, task, train__steps=5)["test"] == {"loss": 2.0}
    assert task.predicted == ["test"] and len(load(tmp_path / PREDICTIONS)) == 1


def test_evaluation_by_seconds(tmp_path: Path) -> None:
    summary = toy.run(tmp_path, eval__steps=0, eval__seconds=1e-9, train__steps=5)
    assert [p["step"] for p in summary["curve"]["points"]] == [1, 2, 3, 4, 5]


def test_time_limit_ends_the_run(tmp_path: Path) -> None:
    summary = toy.run(tmp_path, train__max_seconds=1e-9)
    assert summary["steps"] == 1 and summary["stopped_by"] == "seconds"


def test_nan_loss_names_the_step_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step 13"):
        toy.run(tmp_path, toy.Toy(poison=12))
    assert latest(tmp_path).name == "10"
    assert np.isfinite([loss for _, loss in losses(tmp_path)]).all()
    assert toy.run(tmp_path, toy.Toy())["steps"] == 20


@pytest.mark.medium
def test_run_without_a_finite_evaluation_raises_user_error(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"every evaluation of .* gave NaN or infinity as error: start"
    ):
        toy.run(tmp_path, toy.Toy(scores=[float("nan")]), train__steps=10)


def test_initial_model_without_a_finite_value_suggests_correcting_the_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"NaN or infinity as error: correct the data .* another"):
        toy.run(tmp_path, toy.Toy(scores=[float("nan")]), train__steps=0, eval__start=True)


def test_nan_loss_of_the_first_step_suggests_correcting_the_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"step 1 of .*: training stopped; correct the data"):
        toy.run(tmp_path, toy.Toy(poison=0))


def test_task_of_another_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"class that inherits common.train.task.Task, got <object"):
        toy.run(tmp_path, object())


def test_step_with_nan_loss_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step 10"):
        toy.run(tmp_path, toy.Toy(poison=9))
    assert latest(tmp_path).name == "5"


@pytest.mark.parametrize(
    "damage", ["flip", *(pytest.param(x, marks=pytest.mark.medium) for x in ("cut", "remove"))]
)
def test_damaged_checkpoint_falls_back_to_the_previous_one(
    tmp_path: Path, capsys: pytest.CaptureFixture, damage: str
) -> None:
    toy.run(tmp_path / "once")
    toy.run(tmp_path / "run", train__steps=10)
    newest = latest(tmp_path / "run")
    # The checkpoint has several copies of small arrays. Damage all copies.
    for path in [p for p in (newest / "state").rglob("*") if p.is_file() and "/d/" in str(p)]:
        content = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "flip":
            content[len(content) // 2] ^= 0xFF
            path.write_bytes(content)
        else:
            path.unlink()
    summary = toy.run(tmp_path / "run")
    assert "checkpoint of step 10 is damaged" in capsys.readouterr().err
    assert summary["steps"] == 20
    assert losses(tmp_path / "run") == losses(tmp_path / "once")
    assert (tmp_path / "run" / "checkpoints" / "damaged" / "10.0").is_dir(), "nothing is deleted"


@pytest.mark.parametrize("field", ['"points"', '"clock"'])
def test_damaged_run_state_falls_back_to_the_previous_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture, field: str
) -> None:
    toy.run(tmp_path, train__steps=10)
    meta = latest(tmp_path) / "meta" / "metadata"
    meta.write_text(meta.read_text().replace(field, '"other"'))
    assert toy.run(tmp_path)["steps"] == 20
    fault = rf"the checkpoint of step 10 is damaged \(its JSON part .*{field[1:-1]}.*from step 5"
    assert re.search(fault, capsys.readouterr().err)


def test_damaged_run_state_of_the_only_checkpoint_names_the_checkpoints(
    tmp_path: Path,
) -> None:
    toy.run(tmp_path, train__steps=5)
    meta = latest(tmp_path) / "meta" / "metadata"
    meta.write_text(meta.read_text().replace('"points"', '"other"'))
    folder = tmp_path / "checkpoints"
    with pytest.raises(UserError, match=rf"no intact checkpoint in {folder} \(step 5: its JSON"):
        toy.run(tmp_path)


def test_checksum_detects_any_flipped_bit() -> None:
    tree = {"a": np.arange(6.0, dtype=np.float32), "b": np.arange(3, dtype=np.int32)}
    whole = int(checkpoint.checksum(tree))
    for byte in range(24):
        flipped = tree["a"].copy()
        flipped.view(np.uint8)[byte] ^= 1 << (byte % 8)
        assert int(checkpoint.checksum({**tree, "a": flipped})) != whole


def test_resume_without_an_intact_checkpoint_is_refused(tmp_path: Path) -> None:
    toy.run(tmp_path, train__steps=5)
    (latest(tmp_path) / "meta" / "metadata").write_text("{")
    with pytest.raises(UserError, match="no intact checkpoint"):
        toy.run(tmp_path)


def test_resume_with_changed_model_code_is_not_reported_as_damage(tmp_path: Path) -> None:
    class Wide(toy.Toy):
        def build(self, rngs: nnx.Rngs) -> nnx.Module:
            model = toy.Model(rngs)
            model.more = Linear(1, 1, ("mlp", "embed"), rngs=rngs)
            return model

    toy.run(tmp_path, train__steps=5)
    with pytest.raises(UserError, match=r"latest/5, does not match the model: the array more/bias"):
        toy.run(tmp_path, Wide())


def test_lack_of_memory_is_not_reported_as_a_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.run(tmp_path, train__steps=10)

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nMore")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.ocp.StandardCheckpointHandler, "restore", full)
        with pytest.raises(UserError, match=r"latest/10 does not fit into the memory .* use more"):
            toy.run(tmp_path)
    assert latest(tmp_path).name == "10"
    assert not (tmp_path / "checkpoints/damaged").exists()


def test_damaged_record_of_frozen_values_is_a_user_error(tmp_path: Path) -> None:
    toy.run(tmp_path, train__steps=5)
    record = tmp_path / "checkpoints/frozen/0/meta/metadata"
    record.write_text("{")
    with pytest.raises(UserError, match=f"^{record} is damaged"):
        toy.run(tmp_path)


def arrays_of(path: Path) -> str:
    return (path / "state" / "_METADATA").read_text()


def test_frozen_values_are_written_once_beside_the_checkpoints(tmp_path: Path) -> None:
    toy.run(tmp_path, train__steps=10)
    folder = tmp_path / "checkpoints"
    assert "frozen/kernel" not in arrays_of(latest(tmp_path))
    assert "frozen/kernel" not in arrays_of(folder / "best" / "10")
    assert "frozen/kernel" in arrays_of(folder / "frozen" / "0")
    written = (folder / "frozen" / "0" / "meta" / "metadata").stat().st_mtime_ns
    toy.run(tmp_path, train__steps=20)
    assert (folder / "frozen" / "0" / "meta" / "metadata").stat().st_mtime_ns == written


@pytest.fixture
def other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes the last bits of frozen values drawn from a seed, as another linear algebra library may do."""
    draw = frozen.draw_frozen
    monkeypatch.setattr(
        frozen, "draw_frozen", lambda *a: {n: v + np.float32(1e-7) for n, v in draw(*a).items()}
    )


@pytest.mark.medium
def test_resume_uses_saved_frozen_values_if_the_platform_draws_others(
    tmp_path: Path, capsys: pytest.CaptureFixture, request: pytest.FixtureRequest
) -> None:
    toy.run(tmp_path / "once")
    toy.run(tmp_path / "twice", train__steps=10)
    request.getfixturevalue("other_draws")
    capsys.readouterr()
    toy.run(tmp_path / "twice")
    warning = capsys.readouterr().err
    assert "warning: the frozen values drawn from seed 1 on this platform (" in warning
    assert f"NumPy {np.__version__}); the run uses its saved values" in warning
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")


def old_run(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains ten steps and writes the run in the old format: old field names, and no folder of frozen values."""
    old = {new: name for name, new in resume._OLD_NAMES.items()}
    inner = run.Run.metadata

    def metadata(self):
        meta = {old.get(name, name): value for name, value in inner(self).items()}
        drawn = frozen.draw_frozen(self.train_step.abstract_model, self.config.seed)
        return meta | {"reservoirs": freezing.fingerprint(drawn)}

    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "metadata", metadata)
        toy.run(workdir, train__steps=10)
    shutil.rmtree(workdir / "checkpoints" / "frozen")
    path = workdir / "config.json"
    config = json.loads(path.read_text())
    config["checkpoint"]["store_frozen"] = False
    path.write_text(json.dumps(config))


@pytest.mark.medium
def test_resume_of_a_run_without_written_frozen_values_draws_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    toy.run(tmp_path / "once")
    old_run(tmp_path / "old", monkeypatch)
    toy.run(tmp_path / "old")
    assert losses(tmp_path / "old") == losses(tmp_path / "once")
    assert "warning" not in capsys.readouterr().err


@pytest.mark.medium
def test_resume_without_saved_frozen_values_warns_on_another_platform(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    old_run(tmp_path, monkeypatch)
    request.getfixturevalue("other_draws")
    assert toy.run(tmp_path)["steps"] == 20
    assert "(another platform); results may differ" in capsys.readouterr().err


class Signalled(toy.Toy):
    """Sends signals to the process after a few steps of a new run."""

    def __init__(self, *numbers: signal.Signals):
        super().__init__()
        self.numbers = numbers

    def batches(self, start):
        for batch, position in super().batches(start):
            if position["next"] == 8 and start is None:
                for number in self.numbers:
                    os.kill(os.getpid(), number)
            yield batch, position


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]], ids=str)
def test_resume_after_a_signal_is_bit_exact(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """A closed terminal sends SIGHUP twice."""
    toy.run(tmp_path / "once")
    with pytest.raises(Preempted, match=f"{numbers[0].name}: saved step") as stop:
        toy.run(tmp_path / "run", Signalled(*numbers))
    assert stop.value.exit_code == 128 + numbers[0]
    toy.run(tmp_path / "run", Signalled(*numbers))
    assert losses(tmp_path / "run") == losses(tmp_path / "once")


def test_ignored_sighup_does_not_stop_a_run(tmp_path: Path) -> None:
    """nohup starts programs that ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert toy.run(tmp_path, Signalled(signal.SIGHUP))["steps"] == 20
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_while_a_complete_run_is_opened_is_not_lost(tmp_path: Path) -> None:
    """A complete run has no next step, at which a signal is usually handled. If the signal were lost, a suite would
    start its next run.
    """

    class Interrupted(toy.Toy):
        def save(self, workdir: Path) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    toy.run(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        toy.run(tmp_path, Interrupted())
    (tmp_path / "summary.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        toy.run(tmp_path, Interrupted())
    assert not (tmp_path / "summary.json").exists()
    assert toy.run(tmp_path)["steps"] == 20


def test_signal_during_a_vote_is_handled_at_the_next_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives during a vote, which is common: fast processes wait in votes for slow processes."""
    asked = []

    def agree(decision):
        if len(decision) > 2:  # votes within an evaluation have at most two values
            asked.append(decision)
        if len(asked) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return decision

    monkeypatch.setattr(processes, "all_reduce_max", agree)
    with pytest.raises(Preempted, match="SIGTERM: saved step 6 in"):
        toy.run(tmp_path)
    assert [int(decision[0]) for decision in asked] == [0] * 5 + [signal.SIGTERM]


class Stopped(toy.Toy):
    """Sends SIGTERM before step `at`, or in the evaluation of step `during`.

    Evaluations must be at steps 0, 5, 10, ... The evaluation of step `during` is interrupted; no other evaluation is.
    """

    def __init__(self, at: int | None = None, during: int | None = None):
        super().__init__()
        self.at, self.during = at, during

    def batches(self, start):
        for batch, position in super().batches(start):
            if position["next"] - 2 == self.at:  # two batches are copied to the device in advance
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch, position

    def evaluate(self, values, split):
        if self.during == 5 * len(self.evaluated):
            os.kill(os.getpid(), signal.SIGTERM)
            values.interruption()
        return super().evaluate(values, split)


def saved_state(workdir: Path) -> dict:
    return json.loads((latest(workdir) / "meta" / "metadata").read_text())


def curve(points: list[dict]) -> list[tuple[int, float]]:
    return [(point["step"], point["value"]) for point in points]


STOPS = [
    *({"at": 10}, {"during": 10}),
    *(
        pytest.param(x, marks=pytest.mark.medium)
        for x in ({"at": 20}, {"during": 0}, {"during": 20})
    ),
]


@pytest.mark.parametrize("stop", STOPS, ids=str)
def test_signal_saves_first_and_the_resumed_run_evaluates(tmp_path: Path, stop: dict) -> None:
    (step,) = stop.values()
    expected = curve(toy.run(tmp_path / "once", eval__start=True)["curve"]["points"])
    workdir = tmp_path / "run"
    with pytest.raises(Preempted, match=f"SIGTERM: saved step {step} in"):
        toy.run(workdir, Stopped(**stop), eval__start=True)
    assert latest(workdir).name == str(step)
    saved = curve(saved_state(workdir)["curve"]["points"])
    assert saved == [point for point in expected if point[0] < step]
    again = toy.run(workdir, eval__start=True)
    assert curve(again["curve"]["points"]) == expected and again["stopped_by"] == "steps"
    assert losses(workdir) == losses(tmp_path / "once")


def test_seconds_since_the_last_evaluation_count_over_a_restart(tmp_path: Path) -> None:
    """A checkpoint stores step and training seconds of the last evaluation, even if its value was not finite."""
    fields = {"eval__steps": 0, "eval__seconds": 1e-9, "checkpoint__steps": 1}
    toy.run(tmp_path, toy.Toy(scores=[1.0, float("inf")]), train__steps=2, **fields)
    step, seconds = saved_state(tmp_path)["last_evaluation"]
    assert step == 2 and seconds > 0
    task = toy.Toy(scores=[1.0])
    fields |= {"eval__seconds": seconds + 3600}
    toy.run(tmp_path, task, train__steps=4, **fields)
    assert task.evaluated.count("valid") == 1, "only at the end"


def test_unwritable_workdir_of_a_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement.check_shared(tmp_path)
    # For root, `os.access` ignores file permissions.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=f"--workdir={tmp_path} of process 0 is not writable"):
        agreement.check_shared(tmp_path)


def test_failing_process_does_not_wait_at_the_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    barrier = lambda **arguments: waited.append(arguments["key"])  # noqa: E731
    with pytest.raises(OSError, match="read-only"):
        try:
            raise OSError("read-only")
        finally:
            checkpoint.unless_failing(barrier)(key="written", timeout_ms=5)
    assert not waited
    monkeypatch.setattr(ocp.multihost, "get_barrier_sync_fn", lambda **_: barrier)
    toy.run(tmp_path, train__steps=1)
    assert waited, "every wait for a checkpoint uses this barrier"


def test_workdir_is_locked_while_training(tmp_path: Path) -> None:
    with lock_workdir(tmp_path), pytest.raises(UserError, match="another process"):
        toy.run(tmp_path)
    assert toy.run(tmp_path)["steps"] == 20


def test_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    toy.run(tmp_path)
    kept = {p.name for p in (tmp_path / "checkpoints" / "latest").iterdir() if p.name.isdigit()}
    assert kept == {"15", "20"}
    assert Checkpoints(tmp_path).steps() == [15, 20]


@pytest.mark.medium
def test_checkpoint_of_one_device_restores_on_eight(tmp_path: Path) -> None:
    toy.run(tmp_path / "once")
    toy.run(tmp_path / "run", train__steps=10)
    eight = toy.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])
    toy.fit(toy.config(), toy.Toy(), tmp_path / "run", eight)
    one, other = losses(tmp_path / "once"), losses(tmp_path / "run")
    np.testing.assert_allclose([v for _, v in other], [v for _, v in one], rtol=1e-4, atol=1e-7)


class PretrainedWeights(toy.Toy):
    """The toy task, with pretrained weights in the frozen layer.

    Args:
      name: stands for the fingerprint of the weights' file.
      value: value of all pretrained weights.
    """

    def __init__(self, name: str = "one", value: float = 1.0):
        super().__init__()
        self.name, self.value = name, value

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        model = super().build(rngs)
        freezing.mark_loaded(model)
        return model

    def pretrained_weights(
        self, abstract_model: variables.AbstractModel
    ) -> tasks.PretrainedWeights:
        values = {n: jax.numpy.full(v.shape, self.value) for n, v in abstract_model.frozen.items()}
        return tasks.PretrainedWeights(values, self.name)


def test_pretrained_weights_are_used_and_not_stored(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    toy.run(workdir, PretrainedWeights(), train__steps=10)
    kept = ocp.StandardCheckpointer().metadata(latest(workdir).absolute() / "state")
    assert set(kept.item_metadata.tree["trainable"]) == {"trained/kernel", "trained/bias"}
    assert not kept.item_metadata.tree["frozen"]
    whole = toy.run(tmp_path / "whole", PretrainedWeights(), train__steps=20)
    again = toy.run(workdir, PretrainedWeights(), train__steps=20)
    assert losses(workdir) == losses(tmp_path / "whole")
    assert again["test"] == whole["test"]
    # The run uses the pretrained weights: with other weights, the loss of the first step differs.
    toy.run(tmp_path / "other", PretrainedWeights(value=2.0), train__steps=5)
    assert losses(tmp_path / "other")[0] != losses(workdir)[0]


@pytest.mark.medium
def test_resume_with_other_pretrained_weights_is_refused(tmp_path: Path) -> None:
    toy.run(tmp_path, PretrainedWeights(), train__steps=10)
    with pytest.raises(UserError, match="pretrained weights differ from the weights with which"):
        toy.run(tmp_path, PretrainedWeights("two"), train__steps=20)
