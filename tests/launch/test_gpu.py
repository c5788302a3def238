"""launch/gpu.sh: arguments of sbatch, the batch file with a stand-in for srun, and one host with GPUs."""

import shlex
from pathlib import Path

import pytest

from tests.launch.standins import Checkout, flags_of, given, token

# Stand-in for srun: runs the tasks of two nodes one after the other, in the order of SLURM_PROCID. Returns the highest
# exit code. $CODES replaces the exit codes of the tasks.
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
  code=$(cut -d' ' -f "$((SLURM_PROCID + 1))" <<<"${CODES:-$code}")
  ((code == 0)) || echo "srun: error: node3: task $SLURM_PROCID: Exited with exit code $code" >&2
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
    (checkout.root / "configs").mkdir()
    for config in ("c.py", "configs/x.py"):
        (checkout.root / config).touch()
    checkout.commit = checkout.commit_all()
    checkout.stand_in("sbatch", "echo Submitted batch job 70000; exit ${SBATCH:-0}")
    checkout.stand_in("srun", SRUN)
    checkout.stand_in("scontrol", SCONTROL)
    checkout.stand_in("squeue", "echo ${STATE:-RUNNING}")
    return checkout


def gpu(cluster: Checkout, *arguments: str, **environment: str):
    return cluster.run(cluster.root / "launch" / "gpu.sh", *arguments, **environment)


def submitted(cluster: Checkout, *arguments: str) -> Path:
    """Submits with these arguments; returns the path of the batch file."""
    result = gpu(cluster, "slurm", "--log-dir", "my job", *arguments)
    assert result.returncode == 0, result.stderr
    return cluster.root / "my job" / "job.sh"


def test_sbatch_arguments(cluster):
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
def test_job_processes_get_environment_and_arguments(cluster, per_node):
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
    (secret,) = {token(job.parent / f"process-{k}.log") for k in range(count)}
    assert len(secret) == 32 and secret.isalnum() and secret not in job.read_text()


@pytest.mark.parametrize("where", ["local.sh 1", "gpu.sh host --gpus 0", "gpu.sh slurm"])
@pytest.mark.parametrize(
    ("mine", "expected"),
    [("", "{}"), ("--a=1  --b", "{} --a=1  --b"), (" -a", "{}  -a"), ("my.txt", "my.txt")],
)
def test_flags_of_the_user_follow_recommended_flags(cluster, where, mine, expected):
    """A value of XLA_FLAGS that does not begin with a hyphen, after any spaces, is the name of a file with flags."""
    cluster.log_variable("XLA_FLAGS")
    launcher, *options = where.split()
    options[-1:-1] = ["--log-dir", "logs"] if launcher == "local.sh" else []
    options += [] if launcher == "local.sh" else ["--log-dir", "logs"]
    command = cluster.root / "launch" / launcher
    result = cluster.run(command, *options, "c.py", XLA_FLAGS=mine)
    if where == "gpu.sh slurm":
        result = cluster.run("bash", cluster.root / "logs" / "job.sh", XLA_FLAGS=mine, **JOB)
    assert result.returncode == 0, result.stderr
    flags = flags_of("cpu" if launcher == "local.sh" else "gpu")
    assert (cluster.root / "logs/process-0.log").read_text() == expected.format(flags)


def test_preempted_job_is_requeued(cluster):
    job = submitted(cluster, "c.py")
    result = cluster.run("bash", job, TRAINER_CODE="143", **JOB)
    assert result.returncode == 143
    assert cluster.calls("scontrol")[-1] == ["requeue", "70000"]
    assert "requeued, resuming" in result.stdout

    result = cluster.run("bash", job, TRAINER_CODE="143", REQUEUE="1", **JOB)
    assert 'step "requeue" failed' in result.stdout


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ("137 75", "a process was lost: requeued"),
        ("75 75", "a process was lost: requeued"),
        ("137 137", "the run exited with code 137"),
        ("1 0", "the run exited with code 1"),
    ],
)
def test_job_with_lost_process_is_requeued(cluster, codes, words):
    job = submitted(cluster, "--gpus", "2", "c.py")
    result = cluster.run("bash", job, CODES=codes, **JOB)
    assert result.returncode == max(map(int, codes.split()))
    assert words in result.stdout
    assert "Exited with exit code" in result.stderr, "the job's log keeps the message of srun"
    requeued = ["requeue", "70000"] in cluster.calls("scontrol")
    assert requeued == ("75" in codes)

    # In this start no process is lost, so the job is not requeued, even if a process was lost in an earlier start.
    result = cluster.run("bash", job, CODES="1 0", **JOB)
    assert "the run exited with code 1" in result.stdout


@pytest.mark.medium
@pytest.mark.parametrize("codes", ["143", "75"])
def test_requeues_are_limited_by_restarts_option(cluster, codes):
    job = submitted(cluster, "--restarts", "2", "c.py")
    for count in range(4):
        result = cluster.run("bash", job, CODES=codes, SLURM_RESTART_COUNT=str(count), **JOB)
        assert result.returncode == int(codes)
        assert ("not requeued: already" in result.stdout) == (count >= 2)
    assert cluster.calls("scontrol").count(["requeue", "70000"]) == 2

    job.unlink()
    job = submitted(cluster, "--restarts", "0", "c.py")
    assert "already requeued 0 times" in cluster.run("bash", job, CODES=codes, **JOB).stdout


@pytest.mark.parametrize(
    ("code", "state", "stop", "words"),
    [
        ("0", "RUNNING", False, "the run exited with code 0"),
        ("1", "RUNNING", False, "the run exited with code 1"),
        ("143", "COMPLETING", False, "not requeued: Slurm reports the job as COMPLETING"),
        ("143", "RUNNING", True, "stop exists"),
    ],
)
def test_finished_failed_or_cancelled_job_is_not_requeued(cluster, code, state, stop, words):
    job = submitted(cluster, "c.py")
    if stop:
        (job.parent / "stop").touch()
    result = cluster.run("bash", job, TRAINER_CODE=code, STATE=state, **JOB)
    assert result.returncode == int(code)
    assert words in result.stdout
    assert not [call for call in cluster.calls("scontrol") if call[0] == "requeue"]


def test_signal_to_batch_script_waits_for_the_run(cluster):
    # The stand-in for srun sends SIGTERM to the batch script ($PPID), because Slurm may signal the batch script, too.
    cluster.stand_in("srun", "kill -TERM $PPID; sleep 0.3; exit 143")
    job = submitted(cluster, "c.py")
    assert "requeued, resuming" in cluster.run("bash", job, **JOB).stdout


def test_job_runs_the_code_of_its_commit(cluster):
    first = cluster.commit
    (cluster.root / "requirements.txt").write_text("later\n")
    cluster.commit_all()
    job = submitted(cluster, "--commit", first, "c.py")
    code = job.parent / "code"
    assert (code / "requirements.txt").read_text() == "jax\n"
    assert (code / "runs").resolve() == cluster.root / "runs"
    assert (code / "runs").is_dir(), "the folder is created before the first run"
    assert f"--chdir={code}" in cluster.calls("sbatch")[0]
    assert cluster.run("bash", job, **JOB).returncode == 0
    assert str(code / "launch/place.sh") in cluster.calls("srun")[0]

    # The same command again reuses the copy of the code. Another commit or a changed file of the copy is an error.
    assert submitted(cluster, "--commit", first, "c.py") == job
    assert len(cluster.calls("sbatch")) == 2
    for commit in ("HEAD", first):
        result = gpu(cluster, "slurm", "--log-dir", "my job", "--commit", commit, "c.py")
        assert result.returncode == 2
        full = cluster.git("rev-parse", commit)
        assert f"code is not a complete copy of commit {full[:12]}" in result.stderr
        (code / "requirements.txt").write_text("changed\n")
    assert len(cluster.calls("sbatch")) == 2


def test_jobs_submitted_in_the_same_second_have_own_directories(cluster):
    cluster.freeze_date()
    for lr in (1, 2, 3):
        assert gpu(cluster, "slurm", "c.py", f"--config.lr={lr}").returncode == 0
    default = cluster.root / "runs/slurm-c-2026-01-02_03-04-05"
    jobs = [Path(call[-1]) for call in cluster.calls("sbatch")]
    assert jobs == [Path(f"{default}{end}/job.sh") for end in ("", "-2", "-3")]
    for lr, job in enumerate(jobs, 1):
        assert f"--config.lr={lr}" in job.read_text() and str(job.parent) in job.read_text()


def test_directory_of_another_job_is_refused(cluster):
    job = submitted(cluster, "c.py", "--config.lr=1")
    written = job.read_text()
    for options in ((), ("--dry-run",)):
        result = gpu(cluster, "slurm", *options, "--log-dir", "my job", "c.py", "--config.lr=2")
        assert result.returncode == 2 and result.stderr.count("\n") == 1
        assert f"{job} differs from the job of this command" in result.stderr
    assert job.read_text() == written and len(cluster.calls("sbatch")) == 1
    assert submitted(cluster, "c.py", "--config.lr=1") == job, "the same command again resumes"


def test_relative_python_path_is_made_absolute(cluster):
    trainer = cluster.root / "trainer"
    trainer.symlink_to(cluster.bin / "trainer")
    gpu(cluster, "slurm", "--log-dir", "my job", "c.py", PYTHON="./trainer")
    job = cluster.root / "my job" / "job.sh"
    result = cluster.run("env", "--chdir", cluster.folder, "bash", job, **JOB)
    assert result.returncode == 0, result.stdout + result.stderr


def test_failing_step_is_named(cluster):
    result = gpu(cluster, "slurm", "c.py", SBATCH="1")
    assert result.returncode == 1
    assert 'error: step "submit" failed: exit code 1' in result.stderr
    cluster.stand_in("git", '[[ $1 != clone ]] || exit 1; PATH=${PATH#*:} exec git "$@"')
    result = gpu(cluster, "slurm", "--log-dir", "full", "--commit", "HEAD", "c.py")
    assert result.returncode == 1
    assert 'error: step "copy the code" failed' in result.stderr
    assert len(cluster.calls("sbatch")) == 1


def test_dry_run_prints_batch_file_and_command(cluster):
    arguments = ["--log-dir", "my job", "c.py", *ARGUMENTS]
    printed = gpu(cluster, "slurm", "--dry-run", *arguments).stdout
    assert not cluster.calls("sbatch") and not (cluster.root / "my job").exists()
    job = submitted(cluster, "c.py", *ARGUMENTS)
    assert job.read_text() in printed
    assert shlex.split(printed.splitlines()[-1])[1:] == cluster.calls("sbatch")[0]


def test_host_starts_one_process_with_all_gpus(cluster):
    cluster.stand_in("nvidia-smi", "seq 0 3")
    result = gpu(cluster, "host", "--log-dir", "my logs", "c.py", *ARGUMENTS)
    assert result.returncode == 0, result.stderr
    environment, program = given(cluster.root / "my logs" / "process-0.log")
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert environment["TRAINLESS_NUM_PROCESSES"] == "1"
    assert program == ["-m", "reservoir.train", "--config=c.py", *ARGUMENTS]


def test_host_runs_of_the_same_second_have_own_directories(cluster):
    cluster.freeze_date()
    for lr in (1, 2):
        assert gpu(cluster, "host", "--gpus", "0", "c.py", f"--config.lr={lr}").returncode == 0
    for lr, end in ((1, ""), (2, "-2")):
        log = cluster.root / f"runs/local-2026-01-02_03-04-05{end}/process-0.log"
        (start,) = log.read_text().splitlines()
        assert f"--config.lr={lr}" in start


def test_host_processes_share_the_gpus(cluster):
    options = ["-n", "2", "--gpus", "4,5,6,7", "--log-dir", "logs", "-m", "gmlp_lm.train"]
    result = gpu(cluster, "host", *options, "c.py")
    assert result.returncode == 0, result.stderr
    places = [given(cluster.root / "logs" / f"process-{k}.log")[0] for k in range(2)]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["4,5", "6,7"]
    assert [place["TRAINLESS_PROCESS_ID"] for place in places] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a command is required: slurm or host"),
        (("pbs",), "unknown command pbs"),
        (("slurm",), "CONFIG is required"),
        (
            ("slurm", "--nodes", "0", "c.py"),
            "--nodes must be a positive whole number without leading zeros, not '0'",
        ),
        (
            ("slurm", "--gpus", "all", "c.py"),
            "--gpus must be a positive whole number without leading zeros, not 'all'",
        ),
        (
            ("slurm", "--notice", "1m", "c.py"),
            "--notice must be 0 or a positive whole number without leading zeros, not '1m'",
        ),
        (("slurm", "--partition", "gpu", "c.py"), "unknown option --partition of slurm"),
        (("slurm", "--sbatch"), "--sbatch needs a value"),
        (("slurm", "--nodes"), "--nodes needs a value"),
        (("slurm", "--nodse"), "unknown option --nodse of slurm"),
        (
            ("slurm", "c.py", "--workdir=w", "--sbatch", "--partition=gpu"),
            "--sbatch is an option of the launcher: give it before CONFIG",
        ),
        (("slurm", "c.py", "--nodes=2"), "--nodes is an option of the launcher"),
        (("slurm", "c.py", "--dry-run"), "--dry-run is an option of the launcher"),
        (("host", "c.py", "-n", "2"), "-n is an option of the launcher"),
        (("slurm", "configs/X.py:tiny"), "no file configs/X.py: give the path of a configuration"),
        (("host", "--dry-run", "--gpus", "0", "configs"), "no file configs: give the path"),
        (
            ("slurm", "--sbatch", "partition=gpu", "c.py"),
            "--sbatch must be followed by an option, such as --sbatch --name=value, not 'partition=gpu'",
        ),
        (("slurm", "--log-dir", "a%j", "c.py"), "the directory of the logs must not contain %"),
        (
            ("slurm", "--commit", "nowhere", "c.py"),
            "unknown commit nowhere: give --commit a commit of",
        ),
        (("slurm", "--commit", "HEAD", "C.py:tiny"), "no file C.py in commit"),
        (("host", "--nodes", "2", "c.py"), "unknown option --nodes of host"),
        (
            ("host", "-n", "x", "c.py"),
            "-n must be a positive whole number without leading zeros, not 'x'",
        ),
        (
            ("host", "-n", "2", "--gpus", "0,1,2", "c.py"),
            "2 processes cannot share the 3 GPUs",
        ),
        (
            ("host", "--dry-run", "-n", "2", "--gpus", "0,1,2", "c.py"),
            "2 processes cannot share the 3 GPUs",
        ),
        (
            ("host", "--dry-run", "-n", "2", "--gpus", "0,0", "c.py"),
            "the list of GPUs 0 0 repeats a GPU: list each GPU once",
        ),
    ],
)
def test_invalid_usage_exits_with_code_2(cluster, arguments, message):
    result = gpu(cluster, *arguments)
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert not cluster.calls("sbatch") and not (cluster.root / "runs").exists()


def test_missing_programs_exit_with_code_2(cluster):
    (cluster.bin / "sbatch").unlink()
    result = gpu(cluster, "slurm", "c.py")
    assert result.returncode == 2 and "sbatch is not installed" in result.stderr
    cluster.stand_in("nvidia-smi", "exit 9")
    result = gpu(cluster, "host", "c.py")
    assert result.returncode == 2 and "nvidia-smi failed: list the GPUs" in result.stderr


def test_help_lists_environment_variables(cluster):
    shown = gpu(cluster, "--help").stdout
    assert "TRAINLESS_COORDINATOR" in shown and "TRAINLESS_LOST_SECONDS" in shown
    assert "TRAINLESS_JOIN_SECONDS" in shown and "with 75 if" in shown
    assert "example:" in gpu(cluster, "slurm", "--help").stdout
