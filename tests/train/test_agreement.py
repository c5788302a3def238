"""Two processes agree on inputs, on the checkpoint to resume from, on signals, and on training seconds."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.programs import finish, start_several
from tests.train.two import CASES, DELAY, LONG_DELAY, STEP

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> list[tuple[int, list[str]]]:
    """Returns (exit code, printed lines) of both processes, which run all cases one after the other."""
    program = [sys.executable, "-m", "tests.train.two", str(folder), *CASES]
    processes = start_several(program, 2, 1)
    found = [process.communicate(timeout=300)[0].splitlines() for process in processes]
    return [(process.returncode, lines) for process, lines in zip(processes, found, strict=True)]


@pytest.fixture
def results(outputs: list[tuple[int, list[str]]]) -> list[dict]:
    """Returns {name of a case: result} for each process."""
    found = []
    for _, lines in outputs:
        found.append(dict(json.loads(x) for x in lines if x.startswith('["')))
        assert [*found[-1]] == [*CASES], "\n".join(lines)
    return found


@pytest.mark.parametrize(
    ("case", "difference"),
    [
        (
            "differing_data",
            "the fingerprint of the train split is of process 1, not of process 0",
        ),
        ("differing_config", "--config.seed is 2, not 1"),
        ("differing_draws", r"the fingerprint of the drawn frozen values is \w{16}, not \w{16}"),
    ],
)
def test_differing_inputs_are_named_on_all_processes(results, folder, case, difference):
    first, other = (found[case] for found in results)
    assert first == other
    advice = "give all processes the same options, environment variables, code, data and packages"
    assert re.fullmatch(rf"process 1 \(.+\) differs from process 0: {difference}; {advice}", first)
    assert not list((folder / case).glob("checkpoints/latest/*")), "no step was trained"


def test_workdirs_that_are_not_shared_are_named_on_all_processes(results):
    for number, found in enumerate(results):
        assert found["separate_workdirs"] == (
            f"--workdir=W/{number} of process 1 is not the folder that process 0 has opened: use a folder that all"
            " processes share"
        )


def test_differing_data_end_all_processes_with_code_2(outputs, folder):
    for code, lines in outputs:
        assert code == 2, "\n".join(lines)
        assert lines[-1].startswith("error: process 1 (") and "train split" in lines[-1]
    assert not (folder / "exit").exists(), "no file was written"


def test_checkpoint_unreadable_for_one_process_is_skipped_by_all(results, outputs, folder):
    assert [found["unreadable_checkpoint"] for found in results] == [5, 5]
    (warning,) = (
        x for _, lines in outputs for x in lines if "checkpoint of step 10 is damaged" in x
    )
    assert "process 1: OSError: Input/output error" in warning
    assert (folder / "unreadable_checkpoint/checkpoints/damaged/10.0").is_dir()


def test_threads_of_several_checkpoints_wait_at_separate_barriers(results):
    """Process 1 is late, so the threads of the latest and of the best checkpoint wait for it at the same time."""
    assert [found["checkpoints_at_the_same_time"] for found in results] == [[2, 3], [2, 3]]


def test_threads_of_runs_in_turns_wait_at_separate_barriers(results):
    assert [found["checkpoints_in_turns"] for found in results] == [[[2, 3], [2, 3]]] * 2


def test_local_coordinator_listens_on_the_loopback_interface_only(results):
    assert [found["coordinator_hosts"] for found in results] == [["::ffff:127.0.0.1"], []]


def test_late_compilation_of_a_process_is_not_training_time(results):
    """Training seconds stay below half of the delay. The three steps themselves may take tenths of a second."""
    for found in results:
        seconds = found["late_compilation"]
        assert seconds["compile"] > DELAY and seconds["train"] < DELAY / 2


@pytest.mark.slow
def test_compilation_that_is_20_s_late_changes_no_training_seconds(tmp_path):
    """Each process once compiles 20 s late.

    The 20 steps take 1000 simulated seconds together, so each delay that counts as training would add 2 %.
    """
    program = [sys.executable, "-m", "tests.train.two", str(tmp_path), "two_late_compilations"]
    for process in start_several(program, 2, 1):
        lines = finish(process, 2).splitlines()
        (found,) = (json.loads(line)[1] for line in lines if line.startswith('["'))
        plain, late = found["undisturbed"], found["late"]
        assert plain["train"] > 20 * STEP
        assert late["train"] == pytest.approx(plain["train"], rel=0.01)
        assert late["waited"] > LONG_DELAY / 2 > plain["waited"], "one process waited for the other"
        assert late["grown"] == 0.0, "training seconds do not grow during compilation and waiting"
        assert late["compile"] > 2 * LONG_DELAY, "every process counts both delays as compilation"


def test_signal_in_an_evaluation_stops_all_processes_within_seconds(results):
    """Process 1 gets the signal in batch 20 of the first evaluation, which has 200 batches of 0.05 s."""
    first, other = (found["signal_in_evaluation"] for found in results)
    step, batches = first
    assert other == first and step == 5 and 20 <= batches <= 60


def test_processes_agree_on_a_signal_within_seconds(results):
    """Process 1 gets the signal before step 3. A step takes half a second."""
    first, other = (found["signal_between_slow_steps"] for found in results)
    assert other == first and 3 <= first <= 7


def test_processes_agree_on_a_signal_after_every_compilation(results):
    """Process 1 gets the signal before step 32. Every step from step 35 on has a new batch shape and is compiled."""
    assert [found["signal_between_compilations"] for found in results] == [35, 35]


def test_processes_agree_on_a_signal_between_compilations_ahead(results):
    """Process 1 gets the signal in the second of ten compilations. Each process begins at most five of them."""
    for found in results:
        step, begun = found["signal_while_compiling_ahead"]
        assert step == 1 and begun <= 5


@pytest.mark.slow
def test_a_process_may_be_late_at_the_first_exchange():
    """Process 1 is 32 s late. Gloo's default timeout for a connection is 30 s."""
    program = (
        "import time; from common.runtime import processes; processes.initialize(); import jax;"
        "time.sleep(32 * jax.process_index()); print(processes.all_gather(jax.process_index()))"
    )
    for process in start_several([sys.executable, "-c", program], 2, 1):
        assert finish(process).splitlines()[-1] == "[0, 1]"
