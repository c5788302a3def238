#!/usr/bin/env bash
# launch/tpu.sh runs this script on the hosts of a TPU VM. Files beside the copied code: uv/, venv/, cache/ (the code's
# .cache), pid (number of the training process), exit (exit code of the training process, written when the process
# exits) and log (a link to the log). launch/tpu.sh copies the run's token to train-less.token in the home directory.
set -uo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/flags.sh"
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
  printf 'error: host %s: %s\n' "${TRAINLESS_PROCESS_ID:-$(hostname)}" "$1" >&2
  exit 1
}

running() {
  local pid
  pid=$(cat "$home/pid" 2>/dev/null) && [[ ! -e $home/exit ]] &&
    grep --quiet TRAINLESS_COORDINATOR "/proc/$pid/environ" 2>/dev/null
}

action=$1
shift
case $action in
  install) # SETUP
    ! running || fail "a run is active: stop it with launch/tpu.sh stop"
    rm -rf "$home/code"
    mv "$home/code.new" "$home/code" || fail "cannot replace the code: make $home writable"
    [[ -z $1 ]] || bash -c "$1" || fail "--setup failed: see the messages of its command above"
    # uv installs Python 3.12, because the Python of the VM images is older than 3.11.
    uv=$home/uv/bin/uv
    [[ -x $uv ]] || python3 -m pip install --quiet --target "$home/uv" uv || fail "cannot install uv: see the error of pip above"
    "$uv" venv --quiet --allow-existing --python 3.12 "$home/venv" ||
      fail "cannot install Python: see the error of uv above"
    "$uv" pip install --quiet --python "$home/venv/bin/python" \
      -r "$home/code/requirements.txt" 'jax[tpu]' google-cloud-storage==3.17.1 gcsfs==2026.10.1 ||
      fail "cannot install the packages: see the error of uv above"
    ;;
  start) # SECONDS LOG_DIR COMMIT CACHE TYPE LIBTPU_INIT_ARGS ARGUMENTS-OF-PYTHON...
    ! running || fail "a run is active: stop it with launch/tpu.sh stop"
    watched=$1
    shift
    mkdir -p "$1" || fail "cannot write to --log-dir $1: choose another directory"
    log=$(cd "$1" && pwd)/process-$TRAINLESS_PROCESS_ID.log
    TRAINLESS_TOKEN=$(<"$home/../train-less.token") || fail "cannot read ~/train-less.token: repeat the launch/tpu.sh command"
    export TRAINLESS_COMMIT=$2 JAX_COMPILATION_CACHE_DIR=$3 TRAINLESS_TOKEN PYTHONUNBUFFERED=1
    export GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false # gcsfs, which JAX uses for a cache in a bucket, then sends fewer requests
    LIBTPU_INIT_ARGS=${LIBTPU_INIT_ARGS:+$LIBTPU_INIT_ARGS }$5 # the user's flags come last and win
    recommend "$4"
    shift 5
    ln -sfn "$log" "$home/log"
    rm -f "$home/exit" "$home/pid"
    cd "$home/code" || exit
    # Keep .cache when the code is replaced: it has copies of runs in buckets, with files that may not be uploaded yet.
    mkdir -p "$home/cache" && ln -sfn "$home/cache" .cache
    # A process in a new session survives the end of the ssh connection.
    setsid launch/host.sh keep "$home/venv/bin/python" "$@" </dev/null >>"$log" 2>&1 &
    until [[ -s $home/pid ]]; do
      ((SECONDS < 60)) || fail "the process did not start within 60 s: see $log"
      sleep 0.1
    done
    # Watch the process for a while to report early failures, such as a mistyped argument or a missing package.
    deadline=$((SECONDS + watched))
    until [[ -s $home/exit ]] || ((SECONDS >= deadline)); do sleep 0.2; done
    if [[ -s $home/exit && $(<"$home/exit") != 0 ]]; then
      tail -n 5 "$log" >&2
      fail "exited with code $(<"$home/exit"): see the end of $log above"
    fi
    printf 'host %s: started, log in %s\n' "$TRAINLESS_PROCESS_ID" "$log"
    ;;
  keep) # COMMAND...
    "$@" &
    printf '%s\n' $! >"$home/pid"
    wait $!
    printf '%s\n' $? >"$home/exit"
    ;;
  stop) # SECONDS
    running || exit 0
    kill -TERM "$(cat "$home/pid")"
    deadline=$((SECONDS + $1))
    while running; do
      ((SECONDS < deadline)) || fail "the process still runs $1 s after SIGTERM: see its state with launch/tpu.sh status"
      sleep 0.2
    done
    ;;
  status)
    if running; then
      state=running
    elif [[ -e $home/exit ]]; then
      state="exited with code $(<"$home/exit")"
    elif [[ -e $home/pid ]]; then
      state="lost: the process has ended without an exit code, for example by a reboot"
    else
      state="not started"
    fi
    # A progress bar overwrites its line with carriage returns: print the text after the last carriage return.
    printf 'host %s: %s: %s\n' "$TRAINLESS_PROCESS_ID" "$state" \
      "$(tail -n 1 "$home/log" 2>/dev/null | tr '\r' '\n' | tail -n 1)"
    ;;
  follow)
    [[ -e $home/log ]] || fail "no run was started on this host: start one with launch/tpu.sh run"
    if running; then exec tail -n 50 --pid="$(cat "$home/pid")" -F "$home/log"; else exec tail -n 50 "$home/log"; fi
    ;;
esac
