#!/usr/bin/env bash
# Starts one run on GPUs, as a Slurm job or on this host. See `launch/gpu.sh --help`. Needs bash 4.4.
set -uo pipefail

usage() {
  cat <<'END'
usage: launch/gpu.sh slurm [options] CONFIG [args...]
       launch/gpu.sh host  [options] CONFIG [args...]

slurm writes and submits a batch file that runs `python -m MODULE --config=CONFIG args...` on every GPU of the
job, as one run. Before the job's time limit and on preemption, the run saves a checkpoint and the job requeues
itself. A lost process also requeues the job, which then resumes from the last checkpoint. A run that fails in
all processes is not requeued. All nodes must share the storage of the checkout, Python and --workdir.

  --nodes N             number of nodes (default: 1)
  --gpus N              GPUs per node (default: 1)
  --per-node            one process per node instead of one per GPU
  --cpus N              CPU cores per process (default: the cluster's default, often one)
  --sbatch OPTION       additional sbatch option, may be repeated: --sbatch --partition=gpu
  --commit COMMIT       run this commit in a copy of the code (`data` and `runs` are links to the checkout); by
                        default the job runs the checkout as it is when the job starts
  --log-dir DIR         directory of job.sh, job.log and process-K.log (default: runs/slurm-<config>-<date>)
  --restarts N          maximum number of requeues (default: 20)
  --notice SECONDS      time before the job's time limit at which the run is told to save (default: 120)
  --grace SECONDS       time for the other processes to exit after the first has exited (default: 60)

host starts the run on this machine with launch/local.sh.

  -n, --processes N     number of processes, which share the GPUs evenly (default: 1, which is enough for JAX)
  --gpus LIST           GPU numbers 0,1,2,... (default: $CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists)
  --log-dir DIR, --grace SECONDS   see launch/local.sh --help

both:
  -m, --module MODULE   program of each process (default: reservoir.train)
  --dry-run             print files and commands without writing or running them
  -h, --help            print this text

Environment of each process:
  TRAINLESS_COORDINATOR     host:port of process 0
  TRAINLESS_NUM_PROCESSES   number of processes
  TRAINLESS_PROCESS_ID      0, 1, ...
  TRAINLESS_TOKEN           random secret; process 0 refuses connections without this secret
  CUDA_VISIBLE_DEVICES      its GPUs
  XLA_FLAGS                 the flags of launch/flags.sh, followed by your own XLA_FLAGS, which win
Optional, passed on if you set them:
  TRAINLESS_LOST_SECONDS    heartbeat timeout: seconds after which a silent process counts as lost (default: 60)
  TRAINLESS_JOIN_SECONDS    rendezvous timeout: seconds until all processes must be connected (default: 300)

Processes exit with 143 after saving on SIGTERM, and with 75 if another process is lost or missed the rendezvous.
Python is $PYTHON, or the repository's .venv/bin/python, or python3; it needs jax[cuda12] or jax[cuda13].

example: launch/gpu.sh slurm --nodes 2 --gpus 8 --cpus 12 --sbatch --partition=gpu --sbatch --time=8:00:00 \
           configs/wmt_ffn_res.py --workdir=runs/wmt
END
}

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# --- command line --------------------------------------------------------------------------------

where=${1-}
case $where in
  -h | --help) usage && exit 0 ;;
  slurm | host) shift ;;
  '') fault "a command is required: slurm or host" ;;
  *) fault "unknown command $where: use slurm or host" ;;
esac

module=reservoir.train nodes=1 gpus='' per_node='' cpus='' more=() commit='' log_dir=''
notice=120 grace='' restarts=20 processes=1
while [[ ${1-} == -* ]]; do
  case $where:$1 in
    *:-h | *:--help) usage && exit 0 ;;
    *:--dry-run) dry_run=yes && shift && continue ;;
    slurm:--per-node) per_node=yes && shift && continue ;;
  esac
  value=${2-}
  case $where:$1 in
    *:-m | *:--module) module=$value ;;
    *:--log-dir) log_dir=$value ;;
    *:--grace) need_whole "$@" && grace=$value ;;
    host:--gpus) gpus=$value ;;
    host:-n | host:--processes) need_positive "$@" && processes=$value ;;
    slurm:--gpus) need_positive "$@" && gpus=$value ;;
    slurm:--nodes) need_positive "$@" && nodes=$value ;;
    slurm:--cpus) need_positive "$@" && cpus=$value ;;
    slurm:--restarts) need_whole "$@" && restarts=$value ;;
    slurm:--notice) need_whole "$@" && notice=$value ;;
    slurm:--sbatch) need_option "$@" && more+=("$value") ;;
    slurm:--commit) commit=$value ;;
    *) fault "unknown option $1 of $where" ;;
  esac
  need_value "$@"
  shift 2
done
(($# >= 1)) || fault "CONFIG is required"
config=$1
shift
need_no_options "$@"
[[ -n $commit ]] || need_file "$config"
find_python

# --- this host -----------------------------------------------------------------------------------

if [[ $where == host ]]; then
  gpus=${gpus:-${CUDA_VISIBLE_DEVICES-}}
  if [[ -z $gpus ]]; then
    need_program nvidia-smi "list the GPUs with --gpus 0,1,..."
    gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader) ||
      fault "nvidia-smi failed: list the GPUs with --gpus 0,1,..."
    gpus=${gpus//$'\n'/,}
  fi
  IFS=, read -ra listed <<<"$gpus"
  need_gpus "$processes" "${listed[@]}"
  run=("$root/launch/local.sh" --module "$module" --gpus "$gpus")
  [[ -z $log_dir ]] || run+=(--log-dir "$log_dir")
  [[ -z $grace ]] || run+=(--grace "$grace")
  run+=("$processes" "$config" "$@")
  [[ -z $dry_run ]] || step "start" "${run[@]}"
  [[ -n $dry_run ]] || exec "${run[@]}"
  exit
fi

# --- Slurm ---------------------------------------------------------------------------------------

gpus=${gpus:-1}
grace=${grace:-60}
name=${config##*/}
name=${name%%:*}
name=${name%.py}
new=
[[ -n $log_dir ]] || new=yes log_dir=runs/slurm-$name-$(date +%Y-%m-%d_%H-%M-%S)
[[ $log_dir == /* ]] || log_dir=$PWD/$log_dir
[[ $log_dir != *%* ]] ||
  fault "the directory of the logs must not contain %, which Slurm expands: set --log-dir to another path, not $log_dir"
[[ -n $dry_run ]] || need_program sbatch "run this command on a node of the cluster"

if [[ -n $commit ]]; then
  find_commit "$commit"
  need_committed "$config"
fi
[[ -z $new || -n $dry_run ]] || create_log_dir

code=$root folder=$PWD copied=
if [[ -n $commit ]]; then
  code=$log_dir/code folder=$log_dir/code
  # A repeated command reuses a complete copy. The links are created last, so a copy with links is complete.
  if [[ -L $code/data && $(git -C "$code" rev-parse HEAD) == "$commit" ]] && git -C "$code" diff --quiet HEAD; then
    copied=yes
  elif [[ -e $code ]]; then
    fault "$code is not a complete copy of commit ${commit:0:12}: remove $code, or choose another --log-dir"
  fi
fi
per_host=$gpus place=slurm-gpu
[[ -z $per_node ]] || per_host=1 place=slurm
cores=()
[[ -z $cpus ]] || cores=(--cpus-per-task="$cpus")

submit=(sbatch --job-name="$name" --nodes="$nodes" --ntasks-per-node="$per_host" --gpus-per-node="$gpus"
  "${cores[@]}" --requeue --signal="TERM@$notice" --open-mode=append --output="$log_dir/job.log"
  --chdir="$folder" "${more[@]}" "$log_dir/job.sh")
# --kill-on-bad-exit=0: after saving, processes exit one after the other with a nonzero code, and srun must not kill the
# processes that are still saving.
start=(srun --nodes="$nodes" --ntasks="$((nodes * per_host))" --ntasks-per-node="$per_host" "${cores[@]}"
  --kill-on-bad-exit=0 --wait="$grace" --open-mode=append --output="$log_dir/process-%t.log"
  "$code/launch/place.sh" "$place" "$python" -m "$module" --config="$config" "$@")

batch() {
  printf '%s\n' '#!/usr/bin/env bash' '# A run of Train Less; generated by launch/gpu.sh.' 'set -uo pipefail' \
    "log_dir=$(quote "$log_dir") restarts=$restarts" "start=($(quote "${start[@]}"))"
  printf 'export PYTHONPATH=%s PYTHONUNBUFFERED=1\n' "$(quote "$code${PYTHONPATH:+:$PYTHONPATH}")"
  declare -f new_token
  cat <<'END'
export TRAINLESS_TOKEN
TRAINLESS_TOKEN=$(new_token) # a new token after each requeue

say() { printf '[launch] %s: %s\n' "$(date '+%F %T')" "$1"; }

# Before the time limit and on preemption, Slurm sends SIGTERM to the processes, and on some clusters to this script.
# This script does not forward SIGTERM, because a second SIGTERM would end a process that is saving.
trap : TERM

say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"
# Keep srun's messages about exit codes. srun exits with the highest code: the 137 of a killed process hides the 75 of
# the processes that report the loss. A shell around each process could record the code, but would receive Slurm's
# signals instead of the process.
exec 3> >(trap '' TERM && exec tee "$log_dir/ends" >&2)
shown=$!
"${start[@]}" 2>&3 3>&-
code=$?
exec 3>&-
wait "$shown"
lost=
! grep --quiet 'exit code 75$' "$log_dir/ends" || lost=yes

# 143 is 128 + SIGTERM: the run has received SIGTERM and has saved a checkpoint.
if ((code != 143)) && [[ -z $lost ]]; then
  say "the run exited with code $code"
elif [[ -e $log_dir/stop ]]; then
  say "stopped: $log_dir/stop exists"
elif state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && [[ $state != RUNNING ]]; then
  # The job was cancelled, or Slurm requeues it.
  say "not requeued: Slurm reports the job as ${state:-unknown}"
elif ((${SLURM_RESTART_COUNT:-0} >= restarts)); then
  say "not requeued: already requeued ${SLURM_RESTART_COUNT:-0} times (--restarts); submit the same command to resume"
elif scontrol requeue "$SLURM_JOB_ID"; then
  say "${lost:+a process was lost: }requeued, resuming from the last checkpoint"
else
  say 'step "requeue" failed: submit the same command to resume'
fi
exit "$code"
END
}

# Do not replace the job.sh of a different job, because that job may still run.
[[ ! -e $log_dir/job.sh || $(batch) == "$(<"$log_dir/job.sh")" ]] ||
  fault "$log_dir/job.sh differs from the job of this command: choose another --log-dir, or remove $log_dir/job.sh if the job that uses it has ended"
if [[ -n $dry_run ]]; then
  printf '# %s\n' "$log_dir/job.sh"
  batch
  printf '\n'
else
  mkdir -p "$log_dir" || fault "cannot write to --log-dir $log_dir: choose another directory"
  rm -f "$log_dir/stop"
  batch >"$log_dir/job.sh" || fault "cannot write to --log-dir $log_dir: choose another directory"
fi
if [[ -n $commit && -z $copied ]]; then
  step "copy the code" git clone --quiet --no-checkout "$root" "$code"
  step "check the commit out" git -C "$code" checkout --quiet --detach "$commit"
  # `runs` must exist, because the job writes through the link.
  [[ -n $dry_run ]] || mkdir -p "$root/runs" ||
    fault "cannot create the directory $root/runs: make $root writable"
  step "link runs and data" ln -s "$root/runs" "$root/data" "$code"
fi
step "submit" "${submit[@]}"
[[ -n $dry_run ]] || cat >&2 <<END
[launch] follow:  tail -F $(quote "$log_dir")/job.log $(quote "$log_dir")/process-0.log
[launch] save and stop: touch $(quote "$log_dir/stop"); scancel --signal=TERM JOB    (plain scancel may lose steps)
END
