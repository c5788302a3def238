#!/usr/bin/env bash
# Recommended flags of the XLA compiler for a platform. The launchers source this file, and it is a program:
#   XLA_FLAGS="$(launch/flags.sh gpu)" python -m reservoir.train ...
# usage: launch/flags.sh cpu|gpu|TYPE prints the flags: of cpu and gpu for XLA_FLAGS, of TYPE, an accelerator type of
# Google such as v5litepod-16, for LIBTPU_INIT_ARGS.
#
# All flags are known to jax 0.10.2 and libtpu 0.0.42.1, and change the default. An unknown flag ends the program.
# launch/README.md has the same table.
print_flags() { # PLATFORM
  case $1 in
    cpu)
      # XLA aborts a process if its CPU devices reach a collective a minute apart (a warning after 20 s, and the default
      # of 40 s), as on a machine with fewer free cores than devices.
      printf -- '--xla_cpu_collective_call_terminate_timeout_seconds=600'
      ;;
    gpu)
      # Schedules other work between the start and the end of a collective. Off by default: gradients and gathered
      # weights would be exchanged while the GPU waits.
      printf -- '--xla_gpu_enable_latency_hiding_scheduler=true'
      ;;
    v5litepod-*)
      # An all-reduce of a single tensor may run beside matrix products; off by default. Compiled for eight chips, all-
      # reduces of single tensors become asynchronous. An all-reduce that combines several gradients stays synchronous.
      printf -- '--xla_enable_async_all_reduce=true --xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true'
      ;;
  esac
}

# Exports the variable of the compiler with the recommended flags of PLATFORM before the flags that the user has set.
# The compiler uses the last of several values of a flag, so the user's value wins.
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
  [[ $# == 1 && $1 =~ ^(cpu|gpu|v.+)$ ]] || { echo "usage: launch/flags.sh cpu|gpu|TYPE" >&2 && exit 2; }
  print_flags "$1"
  echo
fi
