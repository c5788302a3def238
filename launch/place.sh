#!/usr/bin/env bash
# Sets the TRAINLESS_* variables of one process of a run on a cluster, and on GPUs the recommended XLA_FLAGS, then
# replaces itself with COMMAND.
# usage: launch/place.sh slurm|slurm-gpu|tpu COMMAND...
#
# slurm, slurm-gpu: inside `srun`; slurm-gpu also restricts each process to one GPU of its node.
# tpu:              on each host of a TPU VM; queries Google's metadata server, as JAX does. For several slices,
#                   launch/tpu.sh sets MEGASCALE_*. With N hosts per slice, slice S has the processes S * N to
#                   S * N + N - 1.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/flags.sh"

case $1 in
  slurm | slurm-gpu)
    read -r first < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
    # All hosts of a job compute the same port. The port is above Linux's ephemeral ports. Two jobs on a host have
    # different ports, unless their ids differ by a multiple of 4096.
    TRAINLESS_COORDINATOR=$first:$((61440 + SLURM_JOB_ID % 4096))
    TRAINLESS_NUM_PROCESSES=$SLURM_NTASKS
    TRAINLESS_PROCESS_ID=$SLURM_PROCID
    if [[ $1 == slurm-gpu ]]; then
      IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-}"
      export CUDA_VISIBLE_DEVICES=${gpus[SLURM_LOCALID]-$SLURM_LOCALID}
    fi
    recommend gpu
    ;;
  tpu)
    attribute() {
      curl --fail --silent --show-error --retry 5 --header 'Metadata-Flavor: Google' \
        "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
    }
    # The hosts of this slice: a comma-separated list of host names, or of name:number:address triples. The first
    # entry is process 0 of a run with one slice.
    endpoints=$(attribute worker-network-endpoints)
    IFS=, read -ra hosts <<<"$endpoints"
    number=$(attribute agent-worker-number)
    TRAINLESS_COORDINATOR=${MEGASCALE_COORDINATOR_ADDRESS:-${hosts[0]##*:}}:8482
    TRAINLESS_NUM_PROCESSES=$((${MEGASCALE_NUM_SLICES:-1} * ${#hosts[@]}))
    TRAINLESS_PROCESS_ID=$((${MEGASCALE_SLICE_ID:-0} * ${#hosts[@]} + number))
    ;;
esac
export TRAINLESS_COORDINATOR TRAINLESS_NUM_PROCESSES TRAINLESS_PROCESS_ID
shift
exec "$@"
