#!/usr/bin/env bash
# One process of a run on a cluster: finds its place among the others, then becomes the program.
# usage: launch/place.sh slurm|slurm-gpu|tpu COMMAND...
#
# slurm, slurm-gpu: inside of `srun`; the latter leaves each process of a node the GPU of its own number.
# tpu:              on each host of a TPU VM, which asks Google's metadata server, as JAX itself would.
set -euo pipefail

case $1 in
  slurm | slurm-gpu)
    read -r first < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
    # The same on all hosts, above the ports that Linux hands out by itself, different for jobs that share a host.
    TRAINLESS_COORDINATOR=$first:$((61440 + SLURM_JOB_ID % 4096))
    TRAINLESS_NUM_PROCESSES=$SLURM_NTASKS
    TRAINLESS_PROCESS_ID=$SLURM_PROCID
    if [[ $1 == slurm-gpu ]]; then
      IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES-}"
      export CUDA_VISIBLE_DEVICES=${gpus[SLURM_LOCALID]-$SLURM_LOCALID}
    fi
    ;;
  tpu)
    attribute() {
      curl --fail --silent --show-error --retry 5 --header 'Metadata-Flavor: Google' \
        "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
    }
    # Either names of hosts or triples of name, number and address, process 0 first.
    endpoints=$(attribute worker-network-endpoints)
    IFS=, read -ra hosts <<<"$endpoints"
    TRAINLESS_COORDINATOR=${hosts[0]##*:}:8482
    TRAINLESS_NUM_PROCESSES=${#hosts[@]}
    TRAINLESS_PROCESS_ID=$(attribute agent-worker-number)
    ;;
esac
export TRAINLESS_COORDINATOR TRAINLESS_NUM_PROCESSES TRAINLESS_PROCESS_ID
shift
exec "$@"
