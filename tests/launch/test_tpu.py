"""launch/tpu.sh with a stand-in for gcloud that runs the commands of each host in a directory of its own."""

import json
import re
import shlex
import socket
import time
from pathlib import Path

import pytest

from tests.launch.standins import CACHE, LAUNCH, Checkout, flags_of, given, token

# The file `vm` lists successive states of the TPU VM, the file `queue` successive states of the queued resource. A
# missing file stands for a missing resource. Slice S has the file vm-S and the hosts slices/S/0 and slices/S/1. A call
# that contains $FAIL fails.
GCLOUD = r"""
unset LIBTPU_INIT_ARGS # ssh does not pass variables of this machine
if [[ -n ${FAIL-} && $* == *$FAIL* ]]; then echo "ERROR: (gcloud) ${ERROR-no active account}" >&2; exit 1; fi
if [[ $1 == config ]]; then echo "$CONFIGURED"; exit; fi
cd "$here" || exit
hosts=hosts vm=vm
node=${5%%:*}
[[ $4 != scp ]] || node=${6%%:*}
[[ ! $node =~ -([0-9]+)$ ]] || hosts=slices/${BASH_REMATCH[1]} vm=vm-${BASH_REMATCH[1]}
case $4 in
  describe)
    thing=$vm
    [[ $3 == tpu-vm ]] || thing=queue
    [[ $* != *networkEndpoints* ]] || { echo "address-of-$node"; exit; }
    [[ -e $thing ]] || { echo "ERROR: NOT_FOUND: Resource 'projects/p/$5' was not found" >&2; exit 1; }
    head -n 1 "$thing"
    (($(wc -l <"$thing") == 1)) || sed -i 1d "$thing"
    ;;
  create)
    [[ $* =~ --node-count=([0-9]+) ]] || cp "$here/vm.created" vm
    for ((s = 0; s < ${BASH_REMATCH[1]-0}; s++)); do cp vm.created "vm-$s" && mkdir -p "slices/$s/"{0,1}; done
    [[ $3 == tpu-vm ]] || cp "$here/queue.created" queue
    ;;
  delete) rm -f vm vm-[0-9] queue && rm -rf hosts slices && mkdir -p hosts/0 hosts/1 ;;
  scp) for host in "$hosts"/*; do cp "$5" "$host/${6#*:}"; done ;;
  ssh)
    for argument; do
      case $argument in
        --worker=*) worker=${argument#*=} ;;
        --command=*) command=${argument#*=} ;;
      esac
    done
    code=0
    for k in 0 1; do
      [[ $worker == all || $worker == "$k" ]] || continue
      (cd "$hosts/$k" && HOST=$k bash -c "$command") || code=$?
    done
    exit "$code"
    ;;
esac
"""
METADATA = r"""
case ${*: -1} in
  */agent-worker-number) echo "$HOST" ;;
  */worker-network-endpoints) echo "${ENDPOINTS:-host-a,host-b}" ;;
esac
"""
# `python3 -m pip install --target DIR uv` installs a stand-in for uv that creates environments with the trainer.
PIP = r"""
mkdir -p "${*: -2:1}/bin"
cat >"${*: -2:1}/bin/uv" <<END
#!/usr/bin/env bash
[[ \$1 == venv ]] || exit 0
mkdir -p "\${*: -1}/bin" && ln -sfn "$here/bin/trainer" "\${*: -1}/bin/python"
END
chmod +x "${*: -2:1}/bin/uv"
"""
ARGUMENTS = ["--workdir=/mnt/a b", "it's", '"quoted" $HOME *', "", "two\nlines", "--x=`id`"]
TYPE = ["--type", "v5litepod-16"]
VM = ["compute", "tpus", "tpu-vm"]
QUEUE = ["compute", "tpus", "queued-resources"]


@pytest.fixture
def cloud(tmp_path) -> Checkout:
    checkout = Checkout(tmp_path)
    (checkout.root / "configs").mkdir()
    for config in ("c.py", "configs/x.py"):
        (checkout.root / config).touch()
    checkout.commit = checkout.commit_all()
    for name, behaviour in (("gcloud", GCLOUD), ("curl", METADATA), ("python3", PIP)):
        checkout.stand_in(name, behaviour)
    (tmp_path / "vm.created").write_text("READY\n")
    (tmp_path / "queue.created").write_text("ACTIVE\n")
    for k in "01":
        (tmp_path / "hosts" / k).mkdir(parents=True)
    return checkout


def tpu(cloud: Checkout, *arguments: str, **environment: str):
    return cloud.run(cloud.root / "launch" / "tpu.sh", *arguments, **environment)


def done(cloud: Checkout) -> list[list[str]]:
    """Returns the calls of gcloud except `gcloud config`."""
    return [call for call in cloud.calls("gcloud") if call[0] != "config"]


HOSTS = ("hosts/0", "hosts/1")
HOSTS_OF_SLICES = ("slices/0/0", "slices/0/1", "slices/1/0", "slices/1/1")


def finished(cloud: Checkout, hosts: tuple[str, ...] = HOSTS) -> list[Path]:
    """Waits until the trainers of the hosts have exited; returns the paths of their logs."""
    deadline = time.monotonic() + 30
    while not all((cloud.folder / host / "train-less/exit").exists() for host in hosts):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [
        cloud.folder / host / f"train-less/logs/process-{k}.log" for k, host in enumerate(hosts)
    ]


def started(cloud: Checkout, hosts: tuple[str, ...] = HOSTS) -> None:
    for k, host in enumerate(hosts):
        log = cloud.folder / host / f"train-less/logs/process-{k}.log"
        deadline = time.monotonic() + 30
        while "\n" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_run_creates_copies_installs_and_starts(cloud):
    options = [*TYPE, "--zone", "z", "--project", "p", "--spot", "--create", "--network=my lab"]
    options += ["--ssh", "--internal-ip", "--setup", "echo 'a  b' >mounted", "-m", "gmlp_lm.train"]
    result = tpu(cloud, "run", *options, "pod", "configs/x.py:tiny", *ARGUMENTS)
    assert result.returncode == 0, result.stderr
    where, to = ["--zone=z", "--project=p"], ["--internal-ip", "--worker=all"]
    calls = done(cloud)
    describe = [*VM, "describe", "pod", *where, "--format=value(state)"]
    kind = ["--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite", "--spot"]
    code = str(cloud.root / "runs/tpu-pod/code.tar.gz")
    assert calls[:4] == [
        describe,
        [*VM, "create", "pod", *where, *kind, "--network=my lab"],
        describe,
        [*VM, "scp", code, "pod:train-less.tar.gz", *where, *to],
    ]
    secret = str(cloud.root / "runs/tpu-pod/token")
    assert calls[6] == [*VM, "scp", secret, "pod:train-less.token", *where, *to]
    assert [call[:-1] for call in calls[4:6] + calls[7:]] == [[*VM, "ssh", "pod", *where, *to]] * 3
    assert cloud.calls("python3")[0][:3] == ["-m", "pip", "install"]

    program = ["-m", "gmlp_lm.train", "--config=configs/x.py:tiny", *ARGUMENTS]
    for k, log in enumerate(finished(cloud)):
        place = {"COORDINATOR": "host-a:8482", "NUM_PROCESSES": "2", "PROCESS_ID": str(k)}
        place["COMMIT"] = cloud.commit
        expected = {f"TRAINLESS_{name}": value for name, value in place.items()}
        expected[CACHE] = "/mnt/.cache/compiled-v5litepod-16"
        assert given(log) == (expected, program)
        assert (cloud.folder / f"hosts/{k}/mounted").read_text() == "a  b\n"


def test_flags_of_the_user_follow_recommended_flags(cloud):
    """The user's flags at the time of `run` are part of the request, so `resume` starts with the same flags."""
    cloud.log_variable("LIBTPU_INIT_ARGS")
    options = [*TYPE, "--zone", "z", "--project", "p", "pod", "c.py", "--workdir=/mnt/a"]
    result = tpu(cloud, "run", *options, LIBTPU_INIT_ARGS="--a=1 --b='x y'")
    assert result.returncode == 0, result.stderr
    expected = f"{flags_of(TYPE[1])} --a=1 --b='x y'"
    assert [log.read_text() for log in finished(cloud)] == [expected] * 2
    result = tpu(cloud, "resume", "pod", LIBTPU_INIT_ARGS="--c")
    assert result.returncode == 0, result.stderr
    assert [log.read_text() for log in finished(cloud)] == [expected * 2] * 2


def test_all_hosts_get_the_same_new_token_at_each_start(cloud):
    tpu(cloud, "run", *TYPE, "pod", "c.py", "--workdir=/w")
    first = [token(log) for log in finished(cloud)]
    tpu(cloud, "resume", "pod")
    again = [token(log) for log in finished(cloud)]
    assert len({*first, *again}) == 2 and first[0] == first[1] and again[0] == again[1]
    assert all(len(one) == 32 and one.isalnum() for one in (*first, *again))


def test_token_is_on_no_command_line(cloud):
    """Other users of a machine can read the command lines of its processes, but not a file with mode 600."""
    tpu(cloud, "run", *TYPE, "pod", "c.py", "--workdir=/w")
    secret = token(finished(cloud)[0])
    assert all(secret not in call.read_text() for call in (cloud.folder / "calls").iterdir())
    for path in (cloud.root / "runs/tpu-pod/token", *cloud.folder.glob("hosts/*/train-less.token")):
        assert path.read_text() == secret and path.stat().st_mode & 0o777 == 0o600


def test_run_in_a_bucket_keeps_compiled_programs_in_the_bucket(cloud):
    """The compilation cache is in the bucket of the workdir, where all hosts can read it.

    The .cache of the copied code is a symbolic link to a folder beside the code, so a new copy of the code keeps it.
    """
    tpu(cloud, "run", *TYPE, "pod", "c.py", "--workdir=gs://lab/runs/x")
    for log in finished(cloud):
        environment, program = given(log)
        assert environment[CACHE] == f"gs://lab/.cache/compiled-{TYPE[1]}"
        assert program[-1] == "--workdir=gs://lab/runs/x"
    assert (cloud.folder / "hosts/0/train-less/code/.cache").readlink().name == "cache"


def test_hosts_install_the_tested_packages_for_buckets():
    host, tested = (
        (LAUNCH / place).read_text() for place in ("host.sh", "../requirements-dev.txt")
    )
    pins = re.findall(r"\S+==\S+", host)
    assert {pin.partition("==")[0] for pin in pins} == {"google-cloud-storage", "gcsfs"}
    assert set(pins) <= set(tested.split())


def test_old_endpoint_format(cloud):
    endpoints = "w-0:77:10.0.0.5,w-1:78:10.0.0.6"
    tpu(cloud, "run", *TYPE, "pod", "c.py", "--workdir=/w", ENDPOINTS=endpoints)
    assert given(finished(cloud)[1])[0]["TRAINLESS_COORDINATOR"] == "10.0.0.5:8482"


def test_existing_vm_is_used(cloud):
    (cloud.folder / "vm").write_text("CREATING\nREADY\n")
    result = tpu(cloud, "run", *TYPE, "--poll", "0", "pod", "c.py", "--workdir", "/w")
    assert result.returncode == 0, result.stderr
    assert "pod is CREATING; checking again in 0 s" in result.stderr
    verbs = [call[3] for call in done(cloud)]
    assert verbs == ["describe", "describe", "scp", "ssh", "ssh", "scp", "ssh"]
    finished(cloud)


def test_run_waits_for_queued_resource(cloud):
    (cloud.folder / "queue.created").write_text("WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n")
    options = ["--type", "v6e-8", "--queued", "--poll", "0"]
    result = tpu(cloud, "run", *options, "pod", "c.py", "--workdir=/w")
    assert result.returncode == 0, result.stderr
    kind = ["--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"]
    look = [*QUEUE, "describe", "pod", "--format=value(state.state)"]
    assert done(cloud)[:6] == [
        look,
        [*QUEUE, "create", "pod", "--node-id=pod", *kind],
        *[look] * 3,
        [*VM, "describe", "pod", "--format=value(state)"],
    ]
    finished(cloud)


@pytest.mark.medium
@pytest.mark.parametrize("queued", [False, True])
def test_resume_after_preemption_recreates_vm(cloud, queued):
    options = [*TYPE, "--zone", "z", *["--queued"] * queued]
    tpu(cloud, "run", *options, "pod", "c.py", *ARGUMENTS)
    before = given(finished(cloud)[0])
    (cloud.folder / "vm").write_text("PREEMPTED\n")
    (cloud.root / "launch" / "later").touch()
    cloud.commit_all()
    seen = len(done(cloud))
    result = tpu(cloud, "resume", "--poll", "0", "pod")
    assert result.returncode == 0, result.stderr
    calls = done(cloud)[seen:]
    removal = [*(QUEUE if queued else VM), "delete", "pod", "--zone=z", *["--force"] * queued]
    assert [*removal, "--quiet"] in calls
    assert calls.index([*removal, "--quiet"]) < [call[3] for call in calls].index("create")
    assert given(finished(cloud)[0]) == before, "the new VM gets the same commit and arguments"


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("describe", "look for TPU VM pod"),
        ("create", "create"),
        ("scp", "copy the code"),
        ("code.new &&", "unpack"),
        ("host.sh install", "install"),
        ("train-less.token", "copy the token"),
        ("host.sh start", "start"),
    ],
)
def test_failing_step_is_named_and_ends_the_launch(cloud, part, name):
    result = tpu(cloud, "run", *TYPE, "pod", "c.py", "--workdir=/w", FAIL=part)
    assert result.returncode == 1
    assert f'error: step "{name}" failed' in result.stderr
    assert "no active account" in result.stderr, "the message of gcloud is shown"
    costs = "pod may cost money until it is deleted: launch/tpu.sh delete pod" in result.stderr
    assert costs == (name not in ("look for TPU VM pod", "create"))
    last = -2 if name == "start" else -1  # after a failed start, the started processes are stopped
    assert part in " ".join(cloud.calls("gcloud")[last])


def test_failed_start_on_one_host_stops_the_others(cloud):
    setup = "((HOST == 0)) || { mkdir -p train-less && touch train-less/logs; }"
    run = ["run", *TYPE, "--watch", "0", "--setup", setup, "pod", "c.py", "--workdir=/w", "--wait"]
    result = tpu(cloud, *run)
    assert result.returncode == 1
    assert "host 1: cannot write to" in result.stderr and 'step "start" failed' in result.stderr
    assert (cloud.folder / "hosts/0/train-less/exit").read_text() == "143\n"

    # `resume` reads the request that the failed start has saved. The test edits the request so that the start succeeds.
    (cloud.folder / "hosts/1/train-less/logs").unlink()
    edited = cloud.root / "runs/tpu-pod/request"
    edited.write_bytes(edited.read_bytes().replace(b"touch train-less/logs", b":"))
    assert tpu(cloud, "resume", "--watch", "0", "pod").returncode == 0
    assert tpu(cloud, "stop", "pod").returncode == 0


def test_immediate_exit_is_a_failed_start(cloud):
    result = tpu(cloud, "run", *TYPE, "pod", "c.py", "--workdir=/w", TRAINER_CODE="2")
    assert result.returncode == 1
    for k in "01":
        assert f"error: host {k}: exited with code 2" in result.stderr
    assert result.stderr.count("--workdir=/w") == 2, "the end of each log is shown"


@pytest.mark.medium
def test_new_run_replaces_request_once_started(cloud):
    run = ["run", *TYPE, "--zone", "z", "pod", "c.py", "--workdir=/w"]
    assert tpu(cloud, *run, "--first").returncode == 0
    assert tpu(cloud, *run, "--second", FAIL="host.sh start").returncode == 1
    assert tpu(cloud, "resume", "pod").returncode == 0
    assert tpu(cloud, *run, "--second").returncode == 0
    assert tpu(cloud, "resume", "pod").returncode == 0
    started = [json.loads(line)[1][-1] for line in finished(cloud)[0].read_text().splitlines()]
    assert started == ["--first", "--first", "--second", "--second"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"stage=started\0PATH=/tmp\0", "has the unknown field PATH"),
        (b"stage=$(touch RAN)\0", "is damaged or of an older version"),
        (b"stage=started\0slices=a[$(touch RAN)]\0", "is damaged or of an older version"),
        (b'declare -- stage="started"\ntouch RAN\n', "is damaged or of an older version"),
    ],
)
def test_saved_request_is_not_executed_as_shell_code(cloud, content, message):
    folder = cloud.root / "runs/tpu-pod"
    folder.mkdir(parents=True)
    (folder / "request").write_bytes(content)
    for command in (["resume", "pod"], ["run", *TYPE, "pod", "c.py", "--workdir=/w"]):
        result = tpu(cloud, *command)
        assert result.returncode == 2 and message in result.stderr
        assert result.stderr.count("\n") == 1
    assert not list(cloud.folder.rglob("RAN")) and not done(cloud)


def test_request_is_readable_by_its_owner_only(cloud):
    tpu(cloud, "run", *TYPE, "--setup", "echo secret", "pod", "c.py", "--workdir=/w")
    request = cloud.root / "runs/tpu-pod/request"
    assert "setup=echo secret" in request.read_text() and request.stat().st_mode & 0o777 == 0o600


@pytest.mark.medium
def test_name_is_reusable_after_delete(cloud):
    end = ["pod", "c.py", "--workdir=/w"]
    here = [*TYPE, "--zone", "z", "--project", "p"]
    assert tpu(cloud, "run", *here, *end, FAIL="create").returncode == 1
    kept = (cloud.root / "runs/tpu-pod/request").read_text()
    seen = len(done(cloud))
    for other in (
        ["--type", "v6e-8", *here[2:]],
        [*here, "--zone", "y"],
        [*here, "--project", "q"],
        [*here, "--queued"],
    ):
        result = tpu(cloud, "run", *other, *end)
        assert result.returncode == 2
        assert (
            "requested with --type v5litepod-16 --zone z --project p, not --type " in result.stderr
        )
        assert "delete it first: launch/tpu.sh delete pod" in result.stderr
    assert len(done(cloud)) == seen
    assert (cloud.root / "runs/tpu-pod/request").read_text() == kept

    # `delete` also works if the VM was never created. A run may then request another type.
    result = tpu(cloud, "delete", "pod")
    assert result.returncode == 0 and "pod does not exist" in result.stderr
    assert tpu(cloud, "run", "--type", "v6e-8", *end).returncode == 0
    assert tpu(cloud, "delete", "pod").returncode == 0
    assert tpu(cloud, "resume", "pod").returncode == 0, "`resume` recreates a deleted VM"
    assert tpu(cloud, "run", *here, *end).returncode == 2


def test_vm_keeps_zone_and_project_of_its_run(cloud):
    run = ["run", *TYPE, "pod", "c.py", "--workdir=/w"]
    assert tpu(cloud, *run, CONFIGURED="here").returncode == 0
    assert tpu(cloud, "delete", "pod", CONFIGURED="elsewhere").returncode == 0
    assert all({"--zone=here", "--project=here"} < set(call) for call in done(cloud))
    assert done(cloud)[-1] == [*VM, "delete", "pod", "--zone=here", "--project=here", "--quiet"]


def test_permission_error_does_not_count_as_deleted(cloud):
    run = ["run", *TYPE, "--zone", "z", "pod", "c.py", "--workdir=/w"]
    assert tpu(cloud, *run).returncode == 0
    denied = "PERMISSION_DENIED: Location z is not found or access is unauthorized."
    result = tpu(cloud, "delete", "pod", FAIL="describe", ERROR=denied)
    assert result.returncode == 1 and denied in result.stderr and "gone" not in result.stderr
    assert "stage=started\0" in (cloud.root / "runs/tpu-pod/request").read_text()


def test_failing_host_is_named(cloud):
    result = tpu(cloud, "run", *TYPE, "--setup", "((HOST == 0))", "pod", "c.py", "--workdir=/w")
    assert result.returncode == 1
    assert f"error: host {socket.gethostname()}: --setup failed" in result.stderr
    assert 'step "install" failed' in result.stderr


def test_vm_stopping_during_wait_raises_error(cloud):
    (cloud.folder / "vm.created").write_text("CREATING\nSTOPPED\n")
    result = tpu(cloud, "run", *TYPE, "--poll", "0", "pod", "c.py", "--workdir=/w")
    assert result.returncode == 1
    assert 'step "wait" failed: pod is STOPPED' in result.stderr


def test_dry_run_prints_commands_without_running_them(cloud):
    arguments = ["run", *TYPE, "pod", "c.py", "--workdir=/mnt/a b", "it's", '"quoted" $HOME *', ""]
    printed = tpu(cloud, "run", "--dry-run", *arguments[1:])
    assert printed.returncode == 0, printed.stderr
    assert not cloud.calls("gcloud") and not (cloud.root / "runs").exists()
    commands = [
        shlex.split(line) for line in printed.stdout.splitlines() if not line.startswith("#")
    ]
    tpu(cloud, *arguments)
    finished(cloud)
    assert [c[1:] for c in commands if c[0] == "gcloud"] == cloud.calls("gcloud")
    assert [c[3] for c in commands if c[0] == "git"] == ["archive"]


def test_status_follow_stop_and_delete(cloud):
    options = [*TYPE, "--zone", "z", "--watch", "0"]
    tpu(cloud, "run", *options, "pod", "c.py", "--workdir=/w", "--wait")
    started(cloud)
    shown = tpu(cloud, "status", "pod").stdout
    assert "TPU VM pod: READY" in shown and "host 0: running: " in shown and "host 1" in shown

    again = tpu(cloud, "resume", "pod")
    assert again.returncode == 1 and "a run is active" in again.stderr

    assert tpu(cloud, "stop", "pod").returncode == 0
    assert [log.read_text().splitlines()[1:] for log in finished(cloud)] == [["saved"]] * 2
    assert "host 1: exited with code 143: saved" in tpu(cloud, "status", "pod").stdout

    assert tpu(cloud, "follow", "--host", "1", "pod").stdout.endswith("saved\n")
    to = ["--worker=1", "--command=train-less/code/launch/host.sh follow"]
    assert cloud.calls("gcloud")[-1] == [*VM, "ssh", "pod", "--zone=z", *to]

    assert tpu(cloud, "delete", "pod").returncode == 0
    assert cloud.calls("gcloud")[-1] == [*VM, "delete", "pod", "--zone=z", "--quiet"]
    assert "TPU VM pod: gone" in tpu(cloud, "status", "pod").stdout


def several(*options: str) -> list[str]:
    """Returns the arguments of tpu.sh that start a run on two slices."""
    return [
        "run",
        *TYPE,
        "--slices",
        "2",
        "--poll",
        "0",
        *options,
        "pod",
        "c.py",
        "--workdir=/mnt/w",
    ]


def test_slices_start_as_one_run(cloud):
    (cloud.folder / "vm.created").write_text("CREATING\nREADY\n")
    result = tpu(cloud, *several("--zone", "z", "--spot"))
    assert result.returncode == 0, result.stderr
    (create,) = (call for call in done(cloud) if call[3] == "create")
    nodes = ["--node-count=2", "--node-prefix=pod", "--zone=z"]
    kind = ["--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"]
    assert create == [*QUEUE, "create", "pod", *nodes, *kind]
    assert {call[4] for call in done(cloud) if call[3] == "ssh"} == {"pod-0", "pod-1"}
    assert {call[5] for call in done(cloud) if call[3] == "scp"} == {
        f"pod-{k}:train-less.{name}" for k in range(2) for name in ("tar.gz", "token")
    }
    logs = finished(cloud, HOSTS_OF_SLICES)
    assert len({token(log) for log in logs}) == 1
    for k, log in enumerate(logs):
        environment, program = given(log)
        assert program == ["-m", "reservoir.train", "--config=c.py", "--workdir=/mnt/w"]
        assert environment == {
            "TRAINLESS_COORDINATOR": "address-of-pod-0:8482",
            "TRAINLESS_NUM_PROCESSES": "4",
            "TRAINLESS_PROCESS_ID": str(k),
            "TRAINLESS_COMMIT": cloud.commit,
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": str(k // 2),
            "MEGASCALE_COORDINATOR_ADDRESS": "address-of-pod-0",
            "MEGASCALE_PORT": "8081",
            CACHE: "/mnt/.cache/compiled-v5litepod-16",
        }


@pytest.mark.medium
def test_dry_run_of_slices_prints_every_command(cloud):
    printed = tpu(cloud, "run", "--dry-run", *several()[1:])
    assert printed.returncode == 0, printed.stderr
    assert not cloud.calls("gcloud")
    tpu(cloud, *several())
    finished(cloud, HOSTS_OF_SLICES)

    def plain(words: list[str]) -> str:
        return " ".join(words).replace("address-of-pod-0", "ADDRESS")

    lines = [shlex.split(line) for line in printed.stdout.splitlines() if line[0] != "#"]
    expected = sorted(plain(line[1:]) for line in lines if line[0] == "gcloud")
    assert expected == sorted(plain(call) for call in cloud.calls("gcloud"))


@pytest.mark.medium
def test_status_follow_stop_and_delete_reach_every_slice(cloud):
    tpu(cloud, *several("--watch", "0"), "--wait")
    started(cloud, HOSTS_OF_SLICES)
    shown = tpu(cloud, "status", "pod").stdout
    assert "queued resource pod: ACTIVE" in shown
    assert "TPU VM pod-0: READY" in shown and "TPU VM pod-1: READY" in shown
    assert all(f"host {k}: running: " in shown for k in range(4))

    assert tpu(cloud, "stop", "pod").returncode == 0
    logs = finished(cloud, HOSTS_OF_SLICES)
    assert [log.read_text().splitlines()[1:] for log in logs] == [["saved"]] * 4
    followed = tpu(cloud, "follow", "--slice", "1", "--host", "0", "pod").stdout
    assert followed == logs[2].read_text()

    (cloud.folder / "vm-1").write_text("PREEMPTED\n")
    result = tpu(cloud, "status", "pod")
    assert "TPU VM pod-1: PREEMPTED" in result.stdout and "host 0: exited" in result.stdout
    assert "launch/tpu.sh resume pod" in result.stderr

    assert tpu(cloud, "delete", "pod").returncode == 0
    assert done(cloud)[-1] == [*QUEUE, "delete", "pod", "--force", "--quiet"]


@pytest.mark.medium
def test_resume_recreates_all_slices_if_one_is_preempted(cloud):
    tpu(cloud, *several())
    before = [given(log) for log in finished(cloud, HOSTS_OF_SLICES)]
    (cloud.folder / "vm-0").write_text("PREEMPTED\n")
    seen = len(done(cloud))
    result = tpu(cloud, "resume", "--poll", "0", "pod")
    assert result.returncode == 0, result.stderr
    verbs = [call[3] for call in done(cloud)[seen:]]
    assert verbs.index("delete") < verbs.index("create")
    assert [given(log) for log in finished(cloud, HOSTS_OF_SLICES)] == before


@pytest.mark.medium
def test_failed_start_in_one_slice_stops_the_other(cloud):
    setup = "[[ $PWD != */1/1 ]] || { mkdir -p train-less && touch train-less/logs; }"
    result = tpu(cloud, *several("--watch", "0", "--setup", setup), "--wait")
    assert result.returncode == 1
    assert "host 3: cannot write to" in result.stderr
    assert 'step "start, pod-1" failed' in result.stderr
    for host in HOSTS_OF_SLICES[:3]:
        ended = cloud.folder / host / "train-less/exit"
        # The exit code of a stopped program may be written a moment after tpu.sh has returned.
        limit = time.monotonic() + 30
        while not ended.exists() and time.monotonic() < limit:
            time.sleep(0.1)
        assert ended.read_text() == "143\n"


@pytest.mark.medium
def test_number_of_slices_is_fixed_until_delete(cloud):
    assert tpu(cloud, *several()).returncode == 0
    result = tpu(cloud, "run", *TYPE, "--queued", "pod", "c.py", "--workdir=/w")
    assert result.returncode == 2
    told = "requested with --type v5litepod-16 --queued --slices 2, not --type v5litepod-16 --queued; delete"
    assert told in result.stderr
    result = tpu(cloud, "follow", "--slice", "2", "pod")
    assert (
        result.returncode == 2
        and "--slice must be less than 2, the number of slices, not 2" in result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "--slices", "0", "pod"),
            "--slices must be a positive whole number without leading zeros, not '0'",
        ),
        ((), "a command is required"),
        (("launch",), "unknown command launch"),
        (("run",), "NAME is required"),
        (("run", "pod"), "CONFIG is required"),
        (("run", "Pod_1", "c.py"), "NAME must consist of a-z, 0-9 and hyphens"),
        (("run", "pod-", "c.py"), "not end with a hyphen, got 'pod-'"),
        (("run", "pod", "c.py"), "--type is required"),
        (("run", *TYPE, "pod", "c.py"), "--workdir=/DIR (which all hosts share) is required"),
        (("run", *TYPE, "pod", "c.py", "--workdir=runs/x"), "after CONFIG, not runs/x"),
        (("run", *TYPE, "pod", "c.py", "--workdir=gs://b"), "--workdir=gs://BUCKET/DIR or"),
        (
            ("run", *TYPE, "pod", "configs/X.py:tiny", "--workdir=/w"),
            "no file configs/X.py in commit",
        ),
        (("run", *TYPE, "pod", "untracked.py", "--workdir=/w"), "no file untracked.py in commit"),
        (
            ("run", *TYPE, "pod", "c.py", "--workdir=/w", "--spot"),
            "--spot is an option of the launcher: give it before CONFIG",
        ),
        (("run", *TYPE, "pod", "c.py", "--workdir=/w", "--zone=z"), "--zone is an option of the"),
        (("run", *TYPE, "pod", "c.py", "--workdir=/w", "--dry-run"), "--dry-run is an option of"),
        (
            ("run", "--type", "v7x-8", "pod", "c.py", "--workdir=/w"),
            "unknown TPU family of --type v7x-8: use v2-N, v3-N, v4-N, v5litepod-N, v5p-N or v6e-N",
        ),
        (
            ("run", *TYPE, "--slices", "2", "pod", "c.py", "--workdir=/w", "--config.mesh.data=3"),
            "--config.mesh.data=3 must be a multiple of 2, the number of slices",
        ),
        (
            ("run", "--create", "network=lab"),
            "--create must be followed by an option, such as --create --name=value, not 'network=lab'",
        ),
        (("run", "--ssh", "internal-ip"), "--ssh must be followed by an option"),
        (("run", "--spto", "pod"), "unknown option --spto of run"),
        (("run", "--spto"), "unknown option --spto of run"),
        (("stop", "--grace"), "--grace needs a value"),
        (
            ("stop", "--grace", "08", "pod"),
            "--grace must be 0 or a positive whole number without leading zeros, not '08'",
        ),
        (("run", "--type"), "--type needs a value"),
        (
            ("run", "--commit", "nowhere", *TYPE, "pod", "c.py", "--workdir=/w"),
            "unknown commit nowhere: give --commit a commit of",
        ),
        (("resume", "--spot", "pod"), "unknown option --spot of resume"),
        (
            ("resume", "--poll", "soon", "pod"),
            "--poll must be 0 or a positive whole number without leading zeros, not 'soon'",
        ),
        (("resume", "pod"), "unknown TPU VM pod"),
        (("stop", "pod", "now"), "stop does not take the argument now: give only NAME"),
        (("stop", "pod", "--grace", "9"), "unexpected option --grace after NAME: give the options"),
        (("run", "pod", "--type", "v6e-8", "c.py"), "unexpected option --type after NAME"),
    ],
)
def test_invalid_usage_exits_with_code_2(cloud, arguments, message):
    (cloud.root / "untracked.py").touch()
    result = tpu(cloud, *arguments)
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert not cloud.calls("gcloud") and not (cloud.root / "runs").exists()


def test_uncommitted_changes_and_missing_gcloud_raise_errors(cloud, tmp_path):
    (cloud.root / "requirements.txt").write_text("jax==0\n")
    run = ["run", *TYPE, "pod", "c.py", "--workdir=/w"]
    result = tpu(cloud, *run)
    assert result.returncode == 2 and "uncommitted changes would not be copied" in result.stderr
    run[1:1] = ["--commit", "HEAD"]
    (tmp_path / "few").mkdir()
    for name in ("bash", "git", "dirname", "basename", "mkdir"):
        found = next(p for p in map(Path, ("/usr/bin", "/bin")) if (p / name).exists())
        (tmp_path / "few" / name).symlink_to(found / name)
    result = tpu(cloud, *run, PATH=str(tmp_path / "few"))
    assert result.returncode == 2 and "gcloud is not installed" in result.stderr


def test_help_lists_environment_variables(cloud):
    shown = tpu(cloud, "--help").stdout
    assert "TRAINLESS_COORDINATOR" in shown and "TRAINLESS_LOST_SECONDS" in shown
    assert "TRAINLESS_JOIN_SECONDS" in shown and "with 75 if" in shown
    assert "example:" in tpu(cloud, "run", "--help").stdout
