#!/usr/bin/env bash
# Several processes of one run on this machine. `launch/local.sh --help` explains; needs bash 4.
set -uo pipefail

usage() {
  cat <<'EOF'
usage: launch/local.sh [options] N CONFIG [args...]

Starts N processes of `python -m MODULE --config=CONFIG args...` on this machine, as one run:
the same code path as several hosts, without the hosts.

  -m, --module MODULE   what each process runs (default: reservoir.train)
  --log-dir DIR         where process-K.log goes (default: runs/local-<date>); logs are appended
  --grace SECONDS       from TERM to KILL, once a process has failed (default: 30)
  --gpus LIST           divide these GPUs (0,1,2,...) among the processes, in order
  -h, --help            this text

Each process finds in its environment
  TRAINLESS_COORDINATOR     host:port of process 0, on a free port of 127.0.0.1
  TRAINLESS_NUM_PROCESSES   N
  TRAINLESS_PROCESS_ID      0 .. N-1
  CUDA_VISIBLE_DEVICES      its share, with --gpus
and reads, where you set them,
  TRAINLESS_LOST_SECONDS    silence after which a process is lost (default: 60)
  TRAINLESS_JOIN_SECONDS    how long processes wait for each other at the start (default: 300)
and writes to its own log; the output of process 0 is shown here as well. Python is $PYTHON, else
the repository's .venv/bin/python, else python3.

Ctrl-C and SIGTERM go to every process, and the launcher waits for all of them to save and end; a
second one kills them. Where one process fails, the others are ended (TERM, then KILL). The exit
code is that of the first process that failed, or 0; a process ends with 143 when it was told to stop
and has saved, and with 75 when another one is lost or never came.

example: launch/local.sh 2 configs/wmt_ffn_res.py:tiny --workdir=runs/two
EOF
}

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# --- what is asked for ---------------------------------------------------------------------------

module=reservoir.train
log_dir=runs/local-$(date +%Y-%m-%d_%H-%M-%S)
grace=30 gpus=()
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
[[ $# -ge 2 ]] || fault "N and CONFIG are needed"
count=$1 config=$2
shift 2
need_positive N "$count"
((${#gpus[@]} % count == 0)) || fault "${#gpus[@]} GPUs cannot be divided among $count processes"

find_python
mkdir -p "$log_dir" || fault "cannot write to $log_dir"

# The port is free now and could in principle be taken before process 0 binds it; the coordinator
# then says so and the run ends.
port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1])') || fault "$python does not run"

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1} # huge pages: fewer page faults on CPUs
export TRAINLESS_COORDINATOR=127.0.0.1:$port TRAINLESS_NUM_PROCESSES=$count

# --- start ---------------------------------------------------------------------------------------

# Job control gives every process a group of its own: Ctrl-C reaches only this script, which hands
# it on once, and a process starts with SIGINT enabled (bash disables it for plain background jobs).
set -m

pids=() running=()
interrupts=0
code=0

signal_all() {
  local k
  for k in "${!running[@]}"; do kill "-$1" "${pids[k]}" 2>/dev/null; done
}

# Whole groups, so that no data worker outlives its trainer.
kill_all() {
  local k
  for k in "${!running[@]}"; do kill -KILL -- "-${pids[k]}" 2>/dev/null; done
}

interrupt() {
  interrupts=$((interrupts + 1))
  if ((interrupts == 1)); then
    say "SIG$1: handing it to all processes and waiting; once more kills them"
    signal_all "$1"
  else
    say "SIG$1 again: killing all processes"
    kill_all
  fi
}
# Until all processes are known, a signal is only remembered, so that none of them misses it.
early=
trap 'early=INT' INT
trap 'early=TERM' TERM HUP

say "$count x $module, logs in $log_dir, coordinator $TRAINLESS_COORDINATOR"
for ((k = 0; k < count; k++)); do
  log=$log_dir/process-$k.log
  if ((k == 0)); then
    # A substitution rather than a pipe: $! stays the trainer, whose exit code counts. tee outlives
    # the signals, so that the trainer's last words are shown.
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

# The processes are in no terminal's foreground, so a hang-up has to be handed on as well.
trap 'interrupt INT' INT
trap 'interrupt TERM' TERM HUP
[[ -z $early ]] || interrupt "$early"

# --- wait ----------------------------------------------------------------------------------------

describe() {
  if (($1 > 128)) && kill -l "$1" >/dev/null 2>&1; then
    printf 'was killed by SIG%s' "$(kill -l "$1")"
  else
    printf 'ended with exit code %s' "$1"
  fi
}

# Polling, because `wait` on many children names neither the one that ended nor its code.
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
    ((k == 0)) || tail -n 20 "$log_dir/process-$k.log" >&2
    say "process $k $(describe "$status"): see $log_dir/process-$k.log; ending the others"
    signal_all TERM
  done
  if [[ -n $deadline ]] && ((SECONDS > deadline)); then
    say "still running $grace s after a failure: killing processes ${!running[*]}"
    kill_all
    deadline=
  fi
  # In the background, because bash may drop a SIGINT that comes while it waits for a foreground
  # command which survives it; the builtin `wait` is interrupted and the trap runs at once.
  sleep 0.1 &
  wait $!
done
wait "$shown"
exit "$code"
