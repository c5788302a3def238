"""launch/gpu.sh: what sbatch is given, the batch file run for real with a stand-in for srun, and a host with GPUs."""

import shlex
from pathlib import Path

import pytest

from tests.launch.standins import Checkout, given

# Runs the tasks of two nodes one after the other, as Slurm would place them, and returns the highest code of them.
SRUN = r"""
while [[ $1 == --* ]]; do
  case $1 in
    --ntasks=*) tasks=${1#*=} ;;
    --ntasks-per-node=*) per_node=${1#*=} ;;
    --output=*) output=${1#*=} ;;
  esac
  shift
done
highest=0
export SLURM_NTASKS=$tasks SLURM_STEP_NODELIST='node[3-4]' SLURM_PROCID SLURM_LOCALID
for ((SLURM_PROCID = 0; SLURM_PROCID < tasks; SLURM_PROCID++)); do
  SLURM_LOCALID=$((SLURM_PROCID % per_node))
  "$@" >>"${output//%t/$SLURM_PROCID}"
  code=$?
  ((code <= highest)) || highest=$code
done
exit "$highest"
"""
SCONTROL = r"""
[[ $1 != show ]] || printf 'node3\nnode4\n'
[[ $1 != requeue ]] || exit "${REQUEUE:-0}"
"""
ARGUMENTS = ["--workdir=a b", "it's", '"quoted" $HOME *', "", "two\nlines", "--x=`id`"]
JOB = {"SLURM_JOB_ID": "70000", "SLURM_JOB_NODELIST": "node[3-4]"}


@pytest.fixture
def cluster(tmp_path) -> Checkout:
    checkout = Checkout(tmp_path)
    checkout.stand_in("sbatch", "echo Submitted batch job 70000; exit ${SBATCH:-0}")
    checkout.stand_in("srun", SRUN)
    checkout.stand_in("scontrol", SCONTROL)
    checkout.stand_in("squeue", "echo ${STATE:-RUNNING}")
    return checkout


def gpu(cluster: Checkout, *arguments: str, **environment: str):
    return cluster.run(cluster.root / "launch" / "gpu.sh", *arguments, **environment)


def submitted(cluster: Checkout, *arguments: str) -> Path:
    """The batch file of a submission with these arguments behind the options."""
    result = gpu(cluster, "slurm", "--log-dir", "my job", *arguments)
    assert result.returncode == 0, result.stderr
    return cluster.root / "my job" / "job.sh"


def test_sbatch_is_given_all_options_and_the_batch_file(cluster):
    options = ["--nodes", "2", "--gpus", "4", "--cpus", "12", "--notice", "90"]
    options += ["--sbatch", "--partition=gpu", "--sbatch", "--comment=a b"]
    job = submitted(cluster, *options, "configs/x.py:tiny", *ARGUMENTS)
    assert cluster.calls("sbatch") == [
        [
            "--job-name=x",
            "--nodes=2",
            "--ntasks-per-node=4",
            "--gpus-per-node=4",
            "--cpus-per-task=12",
            "--requeue",
            "--signal=TERM@90",
            "--open-mode=append",
            f"--output={job.parent}/job.log",
            f"--chdir={cluster.root}",
            "--partition=gpu",
            "--comment=a b",
            str(job),
        ]
    ]


@pytest.mark.parametrize("per_node", [False, True])
def test_every_process_of_a_job_gets_its_place_and_the_same_arguments(cluster, per_node):
    options = ["--nodes", "2", "--gpus", "2", "--cpus", "3", *["--per-node"] * per_node]
    job = submitted(cluster, *options, "configs/x.py:tiny", *ARGUMENTS)
    result = cluster.run("bash", job, CUDA_VISIBLE_DEVICES="6,7", **JOB)
    assert result.returncode == 0, result.stdout + result.stderr
    count = 2 if per_node else 4
    (srun,) = cluster.calls("srun")
    assert srun[:5] == [
        "--nodes=2",
        f"--ntasks={count}",
        f"--ntasks-per-node={count // 2}",
        "--cpus-per-task=3",
        "--kill-on-bad-exit=0",
    ]
    for k in range(count):
        environment = {
            "TRAINLESS_COORDINATOR": f"node3:{61440 + 70000 % 4096}",
            "TRAINLESS_NUM_PROCESSES": str(count),
            "TRAINLESS_PROCESS_ID": str(k),
            "CUDA_VISIBLE_DEVICES": "6,7" if per_node else "67"[k % 2],
        }
        program = ["-m", "reservoir.train", "--config=configs/x.py:tiny", *ARGUMENTS]
        assert given(job.parent / f"process-{k}.log") == (environment, program)


def test_a_run_that_was_told_to_stop_is_put_back_into_the_queue(cluster):
    job = submitted(cluster, "c.py")
    result = cluster.run("bash", job, TRAINER_CODE="143", **JOB)
    assert result.returncode == 143
    assert cluster.calls("scontrol")[-1] == ["requeue", "70000"]
    assert "put back into the queue" in result.stdout

    result = cluster.run("bash", job, TRAINER_CODE="143", REQUEUE="1", **JOB)
    assert 'step "requeue" failed' in result.stdout


@pytest.mark.parametrize(
    ("code", "state", "stop", "words"),
    [
        ("0", "RUNNING", False, "the run ended with exit code 0"),
        ("1", "RUNNING", False, "the run ended with exit code 1"),
        ("143", "COMPLETING", False, "left to Slurm, which calls it COMPLETING"),
        ("143", "RUNNING", True, "stop exists"),
    ],
)
def test_what_has_ended_failed_or_was_cancelled_is_not_put_back(cluster, code, state, stop, words):
    job = submitted(cluster, "c.py")
    if stop:
        (job.parent / "stop").touch()
    result = cluster.run("bash", job, TRAINER_CODE=code, STATE=state, **JOB)
    assert result.returncode == int(code)
    assert words in result.stdout
    assert not [call for call in cluster.calls("scontrol") if call[0] == "requeue"]


def test_a_signal_to_the_batch_script_waits_for_the_run(cluster):
    # $PPID of the stand-in is the batch script, which Slurm may signal as well.
    cluster.stand_in("srun", "kill -TERM $PPID; sleep 0.3; exit 143")
    job = submitted(cluster, "c.py")
    assert "put back into the queue" in cluster.run("bash", job, **JOB).stdout


def test_a_job_runs_the_code_of_its_commit(cluster):
    first = cluster.commit
    (cluster.root / "requirements.txt").write_text("later\n")
    cluster.commit_all()
    job = submitted(cluster, "--commit", first, "c.py")
    code = job.parent / "code"
    assert (code / "requirements.txt").read_text() == "jax\n"
    assert (code / "runs").resolve() == cluster.root / "runs"
    assert f"--chdir={code}" in cluster.calls("sbatch")[0]
    assert cluster.run("bash", job, **JOB).returncode == 0
    assert str(code / "launch/place.sh") in cluster.calls("srun")[0]


def test_a_step_that_fails_is_named(cluster):
    result = gpu(cluster, "slurm", "c.py", SBATCH="1")
    assert result.returncode == 1
    assert 'error: step "submit" failed: exit code 1' in result.stderr
    (cluster.root / "taken" / "code").mkdir(parents=True)
    (cluster.root / "taken" / "code" / "x").touch()
    result = gpu(cluster, "slurm", "--log-dir", "taken", "--commit", "HEAD", "c.py")
    assert result.returncode == 1
    assert 'error: step "copy the code" failed' in result.stderr
    assert len(cluster.calls("sbatch")) == 1


def test_a_dry_run_prints_the_batch_file_and_the_command(cluster):
    arguments = ["--log-dir", "my job", "c.py", *ARGUMENTS]
    printed = gpu(cluster, "slurm", "--dry-run", *arguments).stdout
    assert not cluster.calls("sbatch") and not (cluster.root / "my job").exists()
    job = submitted(cluster, "c.py", *ARGUMENTS)
    assert job.read_text() in printed
    assert shlex.split(printed.splitlines()[-1])[1:] == cluster.calls("sbatch")[0]


def test_a_host_runs_one_process_with_all_gpus(cluster):
    cluster.stand_in("nvidia-smi", "seq 0 3")
    result = gpu(cluster, "host", "--log-dir", "my logs", "c.py", *ARGUMENTS)
    assert result.returncode == 0, result.stderr
    environment, program = given(cluster.root / "my logs" / "process-0.log")
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert environment["TRAINLESS_NUM_PROCESSES"] == "1"
    assert program == ["-m", "reservoir.train", "--config=c.py", *ARGUMENTS]


def test_processes_of_a_host_share_the_gpus(cluster):
    options = ["-n", "2", "--gpus", "4,5,6,7", "--log-dir", "logs", "-m", "gmlp_lm.train"]
    result = gpu(cluster, "host", *options, "c.py")
    assert result.returncode == 0, result.stderr
    places = [given(cluster.root / "logs" / f"process-{k}.log")[0] for k in range(2)]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["4,5", "6,7"]
    assert [place["TRAINLESS_PROCESS_ID"] for place in places] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "slurm or host is needed"),
        (("pbs",), "unknown command pbs"),
        (("slurm",), "CONFIG is needed"),
        (("slurm", "--nodes", "0", "c.py"), "--nodes must be a positive whole number, not '0'"),
        (("slurm", "--gpus", "all", "c.py"), "--gpus must be a positive whole number, not 'all'"),
        (("slurm", "--notice", "1m", "c.py"), "--notice must be a whole number, not '1m'"),
        (("slurm", "--partition", "gpu", "c.py"), "unknown option --partition of slurm"),
        (("slurm", "--sbatch"), "--sbatch needs a value"),
        (("slurm", "--log-dir", "a%j", "c.py"), "Slurm gives % a meaning of its own"),
        (("slurm", "--commit", "nowhere", "c.py"), "there is no commit nowhere"),
        (("host", "--nodes", "2", "c.py"), "unknown option --nodes of host"),
        (("host", "-n", "x", "c.py"), "-n must be a positive whole number, not 'x'"),
        (("host", "-n", "2", "--gpus", "0,1,2", "c.py"), "3 GPUs cannot be divided among 2"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(cluster, arguments, message):
    result = gpu(cluster, *arguments)
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert not cluster.calls("sbatch") and not (cluster.root / "runs").exists()


def test_what_is_missing_is_one_line_and_exit_code_2(cluster):
    (cluster.bin / "sbatch").unlink()
    result = gpu(cluster, "slurm", "c.py")
    assert result.returncode == 2 and "there is no sbatch here" in result.stderr
    cluster.stand_in("nvidia-smi", "exit 9")
    result = gpu(cluster, "host", "c.py")
    assert result.returncode == 2 and "nvidia-smi finds no GPU" in result.stderr


def test_help_names_the_environment(cluster):
    assert "TRAINLESS_COORDINATOR" in gpu(cluster, "--help").stdout
    assert "example:" in gpu(cluster, "slurm", "--help").stdout
