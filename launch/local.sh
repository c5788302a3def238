#!/usr/bin/env bash
# Starts several processes of one run on this machine. See `launch/local.sh --help`. Needs bash 4.
set -uo pipefail

usage() {
  cat <<'EOF'
usage: launch/local.sh [options] N CONFIG [args...]

Starts N processes of `python -m MODULE --config=CONFIG args...` on this machine, as one run. A run
on several hosts uses the same code path.

  -m, --module MODULE   program of each process (default: reservoir.train)
  --log-dir DIR         directory of process-K.log (default: runs/local-<date>); logs are appended
  --grace SECONDS       time from the first exit with a nonzero code to SIGKILL of the others (default: 30)
  --gpus LIST           GPUs (0,1,2,...) to divide among the processes, in order
  -h, --help            print this text

Environment of each process:
  TRAINLESS_COORDINATOR     host:port of process 0, on a free port of 127.0.0.1
  TRAINLESS_NUM_PROCESSES   N
  TRAINLESS_PROCESS_ID      0 .. N-1
  TRAINLESS_TOKEN           random secret; process 0 refuses connections without this secret
  CUDA_VISIBLE_DEVICES      its GPUs, with --gpus
  XLA_FLAGS                 the flags of launch/flags.sh, followed by your own XLA_FLAGS, which win
Optional, passed on if you set them:
  TRAINLESS_LOST_SECONDS    heartbeat timeout: seconds after which a silent process counts as lost (default: 60)
  TRAINLESS_JOIN_SECONDS    rendezvous timeout: seconds until all processes must be connected (default: 300)

Each process writes to its own log; the output of process 0 is also shown here. Python is $PYTHON, or
the repository's .venv/bin/python, or python3.

Ctrl-C and SIGTERM are forwarded to every process, and the launcher waits until all have saved and
exited, at most --grace seconds after the first exit with a nonzero code; a second signal kills them. If
a process fails, the others get SIGTERM, then SIGKILL. The launcher exits with the first nonzero exit
code of a process, or with 0. Processes exit with 143 after saving on SIGTERM, and with 75 if another
process is lost or missed the rendezvous.

example: launch/local.sh 2 configs/wmt_ffn_res.py:tiny --workdir=runs/two
EOF
}

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$root/launch/flags.sh"

# --- command line --------------------------------------------------------------------------------

module=reservoir.train
log_dir='' grace=30 gpus=()
while [[ ${1-} == -* ]]; do
  case $1 in
    -h | --help) usage && exit 0 ;;
    -m | --module | --log-dir | --grace | --gpus) need_value "$@" ;;
    *) fault "unknown option $1" ;;
  esac
  case $1 in
    -m | --module) module=$2 ;;
    --log-dir) log_dir=$2 ;;
    --grace) need_whole --grace "$2" && grace=$2 ;;
    --gpus) IFS=, read -ra gpus <<<"$2" ;;
  esac
  shift 2
done
[[ $# -ge 2 ]] || fault "N and CONFIG are required after the options"
count=$1 config=$2
shift 2
need_positive N "$count"
need_no_options "$@"
need_file "$config"
need_gpus "$count" "${gpus[@]}"

find_python
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

# Another program could take the port before process 0 binds it. Process 0 then reports the port and
# the run ends.
port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1])') || fault "cannot run $python: set PYTHON to a Python interpreter"
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$module" 2>/dev/null ||
  fault "$python cannot find module $module, or import its package: give --module a training program, such as reservoir.train"

if [[ -z $log_dir ]]; then
  log_dir=runs/local-$(date +%Y-%m-%d_%H-%M-%S)
  create_log_dir
fi
mkdir -p "$log_dir" || fault "cannot write to --log-dir $log_dir: choose another directory"

export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1} # huge pages: fewer page faults on CPUs
if ((${#gpus[@]})); then recommend gpu; else recommend cpu; fi
export TRAINLESS_COORDINATOR=127.0.0.1:$port TRAINLESS_NUM_PROCESSES=$count TRAINLESS_TOKEN
TRAINLESS_TOKEN=$(new_token)

# --- start ---------------------------------------------------------------------------------------

# Job control gives every process its own process group. Ctrl-C then reaches only this script, which
# forwards one SIGINT to each process. Without job control, bash disables SIGINT for background jobs.
set -m

pids=() running=()
interrupts=0
code=0

signal_all() {
  local k
  for k in "${!running[@]}"; do kill "-$1" "${pids[k]}" 2>/dev/null; done
}

# Kills the process groups, so that data-loading workers do not survive their training process.
kill_all() {
  local k
  for k in "${!running[@]}"; do kill -KILL -- "-${pids[k]}" 2>/dev/null; done
}

interrupt() {
  interrupts=$((interrupts + 1))
  if ((interrupts == 1)); then
    say "SIG$1: forwarded to all processes, waiting for them to exit; a second SIG$1 kills them"
    signal_all "$1"
  else
    say "SIG$1 again: killing all processes"
    kill_all
  fi
} 2>&4
# A signal during the start is forwarded after all processes have started.
early=
trap 'early=INT' INT
trap 'early=TERM' TERM HUP

say "$count x $module, logs in $log_dir, coordinator $TRAINLESS_COORDINATOR"
for ((k = 0; k < count; k++)); do
  log=$log_dir/process-$k.log
  if ((k == 0)); then
    # With a process substitution instead of a pipe, $! is the training process, whose exit code is
    # needed. tee ignores signals, so that it shows the last lines of the training process.
    exec 3> >(trap '' INT TERM HUP && exec tee -a "$log")
    shown=$!
  else
    exec 3>>"$log"
  fi
  if ((${#gpus[@]})); then
    share=$((${#gpus[@]} / count))
    mine=("${gpus[@]:k*share:share}")
    export CUDA_VISIBLE_DEVICES
    CUDA_VISIBLE_DEVICES=$(IFS=, && printf '%s' "${mine[*]}")
  fi
  TRAINLESS_PROCESS_ID=$k "$python" -m "$module" "--config=$config" "$@" </dev/null >&3 2>&1 3>&- &
  pids[k]=$! running[k]=1
  exec 3>&-
done
set +m

# From here on, messages go to file descriptor 4 and stderr to /dev/null, because bash reports killed processes on
# stderr in its own words.
exec 4>&2 2>/dev/null

# The terminal does not send SIGHUP to background process groups, so forward SIGHUP as SIGTERM.
trap 'interrupt INT' INT
trap 'interrupt TERM' TERM HUP
[[ -z $early ]] || interrupt "$early"

# --- wait ----------------------------------------------------------------------------------------

describe() {
  if (($1 > 128)) && kill -l "$1" >/dev/null 2>&1; then
    printf 'was killed by SIG%s' "$(kill -l "$1")"
  else
    printf 'exited with code %s' "$1"
  fi
}

# Poll, because in bash 4 no form of `wait` reports which of several children has exited.
deadline=
while ((${#running[@]})); do
  for k in "${!running[@]}"; do
    kill -0 "${pids[k]}" 2>/dev/null && continue
    wait "${pids[k]}"
    status=$?
    unset "running[k]"
    kill -KILL -- "-${pids[k]}" 2>/dev/null
    ((status == 0 || code != 0)) && continue
    code=$status
    deadline=$((SECONDS + grace))
    ((interrupts == 0)) || continue
    ((k == 0)) || tail -n 20 "$log_dir/process-$k.log" >&4
    say "process $k $(describe "$status"): see $log_dir/process-$k.log; stopping the others" 2>&4
    signal_all TERM
  done
  if [[ -n $deadline ]] && ((SECONDS > deadline)); then
    say "$grace s after the first nonzero exit code: killing processes ${!running[*]}" 2>&4
    kill_all
    deadline=
  fi
  # bash may drop a SIGINT while it waits for a foreground command. A SIGINT interrupts the builtin
  # `wait`, and bash runs the trap at once.
  sleep 0.1 &
  wait $!
done
wait "$shown"
exit "$code"
