#!/usr/bin/env bash
# Recommended flags of the XLA compiler for a platform. The launchers source this file. It is also a program:
#   XLA_FLAGS="$(launch/flags.sh gpu)" python -m reservoir.train ...
# usage: launch/flags.sh cpu|gpu|TYPE
# Prints the flags of cpu or gpu for XLA_FLAGS, or the flags of TYPE for LIBTPU_INIT_ARGS. TYPE is a Google accelerator
# type, such as v5litepod-16.
#
# jax 0.10.2 and libtpu 0.0.42.1 know all of these flags. Each flag changes a default. An unknown flag ends the
# program. launch/FLAGS.md lists the same flags.
print_flags() { # PLATFORM
  case $1 in
    cpu)
      # By default, XLA aborts a process if its CPU devices reach a collective over a minute apart (20 s until a
      # warning, then 40 s). This happens on a machine with fewer free cores than devices.
      printf -- '--xla_cpu_collective_call_terminate_timeout_seconds=600'
      ;;
    gpu)
      # Schedules other work between the start and the end of a collective; off by default. Without this flag, the GPU
      # waits while gradients and weights are exchanged.
      printf -- '--xla_gpu_enable_latency_hiding_scheduler=true'
      ;;
    v5litepod-*)
      # Lets an all-reduce of a single tensor run beside matrix products; off by default. An all-reduce that combines
      # several gradients stays synchronous. Both facts are from programs compiled for eight chips.
      printf -- '--xla_enable_async_all_reduce=true --xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true'
      ;;
  esac
}

# Exports XLA_FLAGS or LIBTPU_INIT_ARGS: the recommended flags of PLATFORM, then the flags that the user has set. The
# compiler uses the last of several values of a flag, so the user's value wins.
recommend() { # PLATFORM
  local flags
  flags=$(print_flags "$1")
  if [[ $1 == v* ]]; then
    export LIBTPU_INIT_ARGS="$flags${LIBTPU_INIT_ARGS:+${flags:+ }$LIBTPU_INIT_ARGS}"
  elif [[ -z ${XLA_FLAGS-} || $XLA_FLAGS =~ ^[[:space:]]*- ]]; then # Other values are the name of a file with flags.
    export XLA_FLAGS="$flags${XLA_FLAGS:+ $XLA_FLAGS}"
  fi
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  [[ $# == 1 && $1 =~ ^(cpu|gpu|v.+)$ ]] || {
    echo "error: give cpu, gpu or an accelerator type such as v5litepod-16, not '$*'" >&2
    exit 2
  }
  print_flags "$1"
  echo
fi
