#!/usr/bin/env bash
# One run on GPUs: as a Slurm job or on this host. `launch/gpu.sh --help` explains; needs bash 4.4.
set -uo pipefail

usage() {
  cat <<'END'
usage: launch/gpu.sh slurm [options] CONFIG [args...]
       launch/gpu.sh host  [options] CONFIG [args...]

slurm writes a batch file and submits it: `python -m MODULE --config=CONFIG args...` on every GPU of the job,
as one run. Ahead of the job's time limit, and when Slurm preempts it, the run saves itself and the job is put
back into the queue, where it goes on from there; so it does when a process was lost, from the last checkpoint.
A run that fails in all its processes is not. The folder of the launcher, Python and the run's --workdir have to
lie on storage that all nodes share.

  --nodes N             nodes of the job (default: 1)
  --gpus N              GPUs of each node (default: 1)
  --per-node            one process for all GPUs of a node, rather than one per GPU
  --cpus N              CPU cores per process; without it Slurm gives what the cluster's default is, often one
  --sbatch OPTION       one more option for sbatch, as often as needed: --sbatch --partition=gpu
  --commit COMMIT       run the code of that commit, in a folder of the job's own (`data` and `runs` are those of
                        the checkout); without it the job runs the checkout as it is whenever it starts
  --log-dir DIR         where job.sh, job.log and process-K.log go (default: runs/slurm-<config>-<date>)
  --restarts N          how often at most the job is put back (default: 20)
  --notice SECONDS      how long before the time limit the run is told to save (default: 120)
  --grace SECONDS       how long the others may go on once one process has ended (default: 60)

host starts the run on this machine by launch/local.sh.

  -n, --processes N     processes, which share the GPUs evenly (default: 1, which is enough for JAX)
  --gpus LIST           their numbers, 0,1,2,... (default: $CUDA_VISIBLE_DEVICES, else all that nvidia-smi lists)
  --log-dir DIR, --grace SECONDS   as launch/local.sh has them

both:
  -m, --module MODULE   what each process runs (default: reservoir.train)
  --dry-run             print what would be written and run, and do nothing
  -h, --help            this text

Each process finds in its environment
  TRAINLESS_COORDINATOR     host:port of process 0
  TRAINLESS_NUM_PROCESSES   how many there are
  TRAINLESS_PROCESS_ID      0, 1, ...
  CUDA_VISIBLE_DEVICES      its GPUs
and reads, where you set them,
  TRAINLESS_LOST_SECONDS    silence after which a process is lost (default: 60)
  TRAINLESS_JOIN_SECONDS    how long processes wait for each other at the start (default: 300)
It ends with exit code 143 when it was told to stop and has saved, and 75 when another one is lost or never came.
Python is $PYTHON, else the repository's .venv/bin/python, else python3; it needs jax[cuda12] or jax[cuda13].

example: launch/gpu.sh slurm --nodes 2 --gpus 8 --cpus 12 --sbatch --partition=gpu --sbatch --time=8:00:00 \
           configs/wmt_ffn_res.py --workdir=runs/wmt
END
}

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# --- what is asked for ---------------------------------------------------------------------------

where=${1-}
case $where in
  -h | --help) usage && exit 0 ;;
  slurm | host) shift ;;
  '') fault "slurm or host is needed" ;;
  *) fault "unknown command $where: slurm or host" ;;
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
    slurm:--sbatch) more+=("$value") ;;
    slurm:--commit) commit=$value ;;
    *) fault "unknown option $1 of $where" ;;
  esac
  need_value "$@"
  shift 2
done
(($# >= 1)) || fault "CONFIG is needed"
config=$1
shift
find_python

# --- this host -----------------------------------------------------------------------------------

if [[ $where == host ]]; then
  gpus=${gpus:-${CUDA_VISIBLE_DEVICES-}}
  if [[ -z $gpus ]]; then
    need_program nvidia-smi "say which GPUs there are, by --gpus 0,1,..."
    listed=$(nvidia-smi --query-gpu=index --format=csv,noheader) || fault "nvidia-smi finds no GPU"
    gpus=${listed//$'\n'/,}
  fi
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
log_dir=${log_dir:-runs/slurm-$name-$(date +%Y-%m-%d_%H-%M-%S)}
[[ $log_dir == /* ]] || log_dir=$PWD/$log_dir
[[ $log_dir != *%* ]] || fault "Slurm gives % a meaning of its own: choose another --log-dir than $log_dir"
[[ -n $dry_run ]] || need_program sbatch "submit from a node of the cluster"

code=$root folder=$PWD copied=
if [[ -n $commit ]]; then
  find_commit "$commit"
  need_committed "$config"
  code=$log_dir/code folder=$log_dir/code
  # The same command again finds its copy, which the links complete.
  if [[ -L $code/data && $(git -C "$code" rev-parse HEAD) == "$commit" ]] && git -C "$code" diff --quiet HEAD; then
    copied=yes
  elif [[ -e $code ]]; then
    fault "$code is no whole copy of commit ${commit:0:12}: remove it, or choose another --log-dir"
  fi
fi
per_host=$gpus place=slurm-gpu
[[ -z $per_node ]] || per_host=1 place=slurm
cores=()
[[ -z $cpus ]] || cores=(--cpus-per-task="$cpus")

submit=(sbatch --job-name="$name" --nodes="$nodes" --ntasks-per-node="$per_host" --gpus-per-node="$gpus"
  "${cores[@]}" --requeue --signal="TERM@$notice" --open-mode=append --output="$log_dir/job.log"
  --chdir="$folder" "${more[@]}" "$log_dir/job.sh")
# Not --kill-on-bad-exit: processes that have saved themselves end one after the other, with a code that is not 0.
start=(srun --nodes="$nodes" --ntasks="$((nodes * per_host))" --ntasks-per-node="$per_host" "${cores[@]}"
  --kill-on-bad-exit=0 --wait="$grace" --open-mode=append --output="$log_dir/process-%t.log"
  "$code/launch/place.sh" "$place" "$python" -m "$module" --config="$config" "$@")

batch() {
  printf '%s\n' '#!/usr/bin/env bash' '# One run of Train Less, written by launch/gpu.sh.' 'set -uo pipefail' \
    "log_dir=$(quote "$log_dir") restarts=$restarts" "start=($(quote "${start[@]}"))"
  printf 'export PYTHONPATH=%s PYTHONUNBUFFERED=1\n' "$(quote "$code${PYTHONPATH:+:$PYTHONPATH}")"
  cat <<'END'

say() { printf '[launch] %s: %s\n' "$(date '+%F %T')" "$1"; }

# Ahead of the limit and on preemption Slurm sends SIGTERM to the processes, not to this script. Where it sends it to
# both, this script only waits: a second SIGTERM would end a process that is saving.
trap : TERM

say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"
# What srun says of the ends of processes is kept: its exit code is the highest one of them, so that the 137 of a process
# that was killed hides the 75 of the others, by which they say that they have lost it. A shell around each process
# would know as well, but take the place of the process that Slurm signals.
exec 3> >(trap '' TERM && exec tee "$log_dir/ends" >&2)
shown=$!
"${start[@]}" 2>&3 3>&-
code=$?
exec 3>&-
wait "$shown"
lost=
! grep --quiet 'exit code 75$' "$log_dir/ends" || lost=yes

# 128 + SIGTERM: the run was told to stop, and has saved itself if it had begun.
if ((code != 143)) && [[ -z $lost ]]; then
  say "the run ended with exit code $code"
elif [[ -e $log_dir/stop ]]; then
  say "stopped: $log_dir/stop exists"
elif state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && [[ $state != RUNNING ]]; then
  # It is cancelled, or Slurm itself puts it back into the queue.
  say "left to Slurm, which calls it ${state:-unknown}"
elif ((${SLURM_RESTART_COUNT:-0} >= restarts)); then
  say "not put back, it was ${SLURM_RESTART_COUNT:-0} times (--restarts): the same command, submitted again, goes on"
elif scontrol requeue "$SLURM_JOB_ID"; then
  say "${lost:+a process was lost: }put back into the queue, where it goes on from the last checkpoint"
else
  say 'step "requeue" failed: the same command, submitted again, goes on'
fi
exit "$code"
END
}

if [[ -n $dry_run ]]; then
  printf '# %s\n' "$log_dir/job.sh"
  batch
  printf '\n'
else
  mkdir -p "$log_dir" || fault "cannot write to $log_dir"
  rm -f "$log_dir/stop"
  batch >"$log_dir/job.sh" || fault "cannot write to $log_dir"
fi
if [[ -n $commit && -z $copied ]]; then
  step "copy the code" git clone --quiet --no-checkout "$root" "$code"
  step "check the commit out" git -C "$code" checkout --quiet --detach "$commit"
  # A link to a folder that is not there could not be written below.
  [[ -n $dry_run ]] || mkdir -p "$root/runs" || fault "cannot write to $root"
  step "link runs and data" ln -s "$root/runs" "$root/data" "$code"
fi
step "submit" "${submit[@]}"
[[ -n $dry_run ]] || cat >&2 <<END
[launch] follow:  tail -F $(quote "$log_dir")/job.log $(quote "$log_dir")/process-0.log
[launch] save and end: touch $(quote "$log_dir/stop"); scancel --signal=TERM JOB    (plain scancel may lose the last steps)
END
