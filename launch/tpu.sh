#!/usr/bin/env bash
# Starts one run on TPU slices (TPU VMs of one or more hosts) with gcloud. See `launch/tpu.sh --help`. Needs bash 4.4.
set -uo pipefail

usage() {
  cat <<'END'
usage: launch/tpu.sh run    [options] NAME CONFIG [args...]
       launch/tpu.sh resume [options] NAME
       launch/tpu.sh status | follow | stop | delete  [options] NAME

run     creates the TPU VM NAME (or uses an existing one), waits until it is ready, copies the code of a commit to
        all hosts, installs Python and the packages, and starts `python -m MODULE --config=CONFIG args...` on
        every host, as one run that continues without the connection. Saves the request (options and arguments) in
        runs/tpu-NAME. If NAME already has a started run, its request is replaced only after the new run has started.
resume  repeats the saved request: on a new TPU VM after preemption, on the same TPU VM after stop. The run resumes
        from its last checkpoint.
status  prints the state of each TPU VM and of each host's process, with the last line of its log
follow  prints the log of a host as it grows; Ctrl-C does not affect the run
stop    tells the run to save and waits until it has exited
delete  deletes the TPU VM and its disks. You pay for the VM until then. NAME can be reused afterwards.

options of run:
  --type TYPE           accelerator type, such as v5litepod-16 or v6e-8 (required)
  --zone ZONE, --project PROJECT   default: gcloud's configuration at the time of run
  --runtime VERSION     VM software version (default: Google's recommendation for JAX on this type)
  --spot                use preemptible capacity
  --queued              request the VM as a queued resource, also named NAME
  --slices N            run on N slices of TYPE as one run: TPU VMs NAME-0, NAME-1, ... of one queued resource NAME
                        (default: 1). The data axis of the mesh (--config.mesh.data) must be a multiple of N
  --create OPTION       additional option of gcloud's create, may be repeated: --create --network=lab
  --setup COMMAND       command to run on each host before installing the packages, such as mounting a disk;
                        resume runs it again, so it must be repeatable
  --log-dir DIR         directory of process-K.log on host K (default: train-less/logs in the home directory)
  --commit COMMIT       code to run (default: HEAD, which requires a clean working tree)
  --ssh OPTION          additional option of gcloud's ssh and scp, may be repeated: --ssh --internal-ip
  -m, --module MODULE   program of each host (default: reservoir.train)
options of run and resume:
  --poll SECONDS        interval between checks of the VM's state (default: 30)
  --watch SECONDS       time to watch the started processes; if one fails, the others are stopped (default: 15)
options of follow:
  --host K, --slice S   number of the host within its slice, and number of the slice (default: 0)
option of stop:
  --grace SECONDS       time to wait for the run to exit (default: 300)
options of all commands:
  --dry-run             print every command without running it
  -h, --help            print this text

args must contain --workdir=gs://BUCKET/DIR or --workdir=/DIR. With several hosts /DIR must be storage that all of them
mount (NFS, Filestore). A directory on the VM's own disk is lost on preemption.

Environment of each process:
  TRAINLESS_COORDINATOR     host:port of process 0
  TRAINLESS_NUM_PROCESSES   number of hosts of all slices
  TRAINLESS_PROCESS_ID      0, 1, ...: number of the host, counted through the slices in their order
  TRAINLESS_COMMIT          commit of the code, for the run's summary
  TRAINLESS_TOKEN           random secret; process 0 refuses connections without this secret
  MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_PORT
                            with several slices: number of slices, number of this slice, address of process 0, and
                            port; libtpu connects the slices with these values
  LIBTPU_INIT_ARGS          the flags of launch/flags.sh, followed by your own LIBTPU_INIT_ARGS at the time of run,
                            which win; resume uses the same flags
  JAX_COMPILATION_CACHE_DIR .cache/compiled-TYPE beside /DIR, or gs://BUCKET/.cache/compiled-TYPE, so that all hosts
                            share compiled programs
Processes exit with 143 after saving on SIGTERM, and with 75 if another process is lost (no heartbeat for 60 s) or
missed the rendezvous (300 s). Your TRAINLESS_LOST_SECONDS and TRAINLESS_JOIN_SECONDS do not change these times.

example: launch/tpu.sh run --type v5litepod-16 --zone us-west4-a --spot --queued \
           pod configs/wmt_ffn_res.py --config.data.source=files:gs://lab/wmt --workdir=gs://lab/runs/wmt
END
}

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# --- command line --------------------------------------------------------------------------------

type='' zone='' project='' runtime='' spot='' queued='' slices=1 create=() setup='' log_dir=train-less/logs commit=''
libtpu_flags='' address=''
module=reservoir.train poll=30 watch=15 host=0 slice=0 grace=300 ssh=() stage=asked
action=${1-}
case $action in
  -h | --help) usage && exit 0 ;;
  run | resume | status | follow | stop | delete) shift ;;
  '') fault "a command is required: run, resume, status, follow, stop or delete" ;;
  *) fault "unknown command $action: use run, resume, status, follow, stop or delete" ;;
esac
while [[ ${1-} == -* ]]; do
  case $action:$1 in
    *:-h | *:--help) usage && exit 0 ;;
    *:--dry-run) dry_run=yes && shift && continue ;;
    run:--spot) spot=yes && shift && continue ;;
    run:--queued) queued=yes && shift && continue ;;
  esac
  value=${2-}
  case $action:$1 in
    run:--ssh) need_option "$@" && ssh+=("$value") ;;
    run:--create) need_option "$@" && create+=("$value") ;;
    run:--log-dir) log_dir=$value ;;
    run:-m | run:--module) module=$value ;;
    run:--type | run:--zone | run:--project | run:--runtime | run:--setup | run:--commit)
      printf -v "${1#--}" %s "$value"
      ;;
    run:--slices) need_positive "$@" && slices=$value ;;
    run:--poll | run:--watch | resume:--poll | resume:--watch | follow:--host | follow:--slice | stop:--grace)
      need_whole "$@" && printf -v "${1#--}" %s "$value"
      ;;
    *) fault "unknown option $1 of $action" ;;
  esac
  need_value "$@"
  shift 2
done
(($# >= 1)) || fault "NAME is required"
name=$1
shift
[[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] ||
  fault "NAME must consist of a-z, 0-9 and hyphens, begin with a letter, and not end with a hyphen, got '$name'"

# Saves the request for later commands, with the `stage` "asked", "started" or "deleted". The request is a file of
# NUL-terminated records NAME=VALUE, with one record for each element of an array. Only the owner can read the file,
# because --setup may contain secrets.
folder=$root/runs/tpu-$name
keep() { # STAGE
  local name value
  stage=$1
  [[ -z $dry_run ]] || return 0
  {
    mkdir -p "$folder" && (umask 077 && : >"$folder/request.new") &&
      for name in stage type zone project runtime spot queued slices setup log_dir commit libtpu_flags \
        create ssh arguments; do
        local -n values=$name
        for value in "${values[@]}"; do printf '%s=%s\0' "$name" "$value"; done
      done >"$folder/request.new" && mv "$folder/request.new" "$folder/request"
  } || fault "cannot write to $folder: make it writable"
}
read_request() {
  local record name
  stage='' slices=1 create=() ssh=() arguments=()
  while IFS= read -r -d '' record; do
    name=${record%%=*}
    case $name in
      stage | type | zone | project | runtime | spot | queued | slices | setup | log_dir | commit | libtpu_flags)
        printf -v "$name" %s "${record#*=}"
        ;;
      create | ssh | arguments) local -n values=$name && values+=("${record#*=}") ;;
      *) fault "$folder/request has the unknown field $name: remove the file, and delete the TPU VM with gcloud" ;;
    esac
  done <"$folder/request"
  # Check the number, because bash would run a command in the subscript of "a[...]" when it computes with $slices.
  [[ $stage =~ ^(asked|started|deleted)$ && $slices =~ ^[1-9][0-9]*$ ]] ||
    fault "$folder/request is damaged or of an older version: remove the file, and delete the TPU VM with gcloud"
}
need_gcloud() { [[ -n $dry_run ]] || need_program gcloud "follow https://cloud.google.com/sdk/docs/install"; }
thing() {
  printf '%s' "--type $type${zone:+ --zone $zone}${project:+ --project $project}${queued:+ --queued}"
  if ((slices == 1)); then printf '\n'; else printf ' --slices %s\n' "$slices"; fi
}

# Sets an empty variable to the value of a gcloud property, so that the request stores the value. Otherwise, if gcloud's
# configuration changes later, `delete` would not find this VM, or would delete another VM of the same name.
pin() { # VARIABLE PROPERTY
  [[ -z ${!1} ]] || return 0
  [[ -z $dry_run ]] || step "ask which $1 gcloud is configured with" gcloud config get-value "$2"
  [[ -n $dry_run ]] || printf -v "$1" %s "$(gcloud config get-value "$2" 2>/dev/null)"
}

# Sets $workdir to the last --workdir among the arguments, or to "".
find_workdir() {
  workdir=
  while (($#)); do
    [[ $1 != --workdir=* ]] || workdir=${1#*=}
    [[ $1 != --workdir ]] || workdir=${2-}
    shift
  done
}

[[ ${1-} != -* ]] || fault "unexpected option $1 after NAME: give the options of $action before NAME"
if [[ $action == run ]]; then
  (($# >= 1)) || fault "CONFIG is required after NAME"
  need_no_options "${@:2}"
  [[ -n $type ]] || fault "--type is required, such as v5litepod-16"
  find_workdir "$@"
  required="--workdir=gs://BUCKET/DIR or --workdir=/DIR (which all hosts share) is required after CONFIG"
  [[ $workdir == gs://*/* || $workdir == /* ]] || fault "$required${workdir:+, not $workdir}"
  find_commit "$commit"
  need_committed "$1"
  case $runtime:$type in
    :v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    :v5p-*) runtime=v2-alpha-tpuv5 ;;
    :v6e-*) runtime=v2-alpha-tpuv6e ;;
    :v[234]-*) runtime=tpu-ubuntu2204-base ;;
    :*) fault "unknown TPU family of --type $type: use v2-N, v3-N, v4-N, v5litepod-N, v5p-N or v6e-N, or set --runtime" ;;
  esac
  for argument in "${@:2}"; do
    [[ ! $argument =~ ^--config\.mesh\.data=([1-9][0-9]*)$ ]] || ((BASH_REMATCH[1] % slices == 0)) ||
      fault "$argument must be a multiple of $slices, the number of slices: change --config.mesh.data or --slices"
  done
  arguments=(-m "$module" --config="$1" "${@:2}")
  libtpu_flags=${LIBTPU_INIT_ARGS-}
  ((slices == 1)) || queued=yes
  need_gcloud
  pin zone compute/zone
  pin project core/project
  if [[ -f $folder/request ]]; then
    { read -r stage && read -r before; } < <(read_request && printf '%s\n' "$stage" && thing) || exit 2
    [[ $stage == deleted || $before == "$(thing)" ]] ||
      fault "$name was requested with $before, not $(thing); delete it first: launch/tpu.sh delete $name"
  fi
else
  (($# == 0)) || fault "$action does not take the argument $1: give only NAME"
  [[ -f $folder/request ]] ||
    fault "unknown TPU VM $name, because $folder/request does not exist: start the VM with launch/tpu.sh run"
  read_request
  need_gcloud
fi

# The TPU VM of each slice. Google names the nodes of a queued resource PREFIX-0, PREFIX-1, ...
nodes=("$name")
((slices == 1)) || for ((k = 0; k < slices; k++)); do nodes[k]=$name-$k; done
((slice < slices)) || fault "--slice must be less than $slices, the number of slices, not $slice"

# --- gcloud --------------------------------------------------------------------------------------

where=(${zone:+--zone="$zone"} ${project:+--project="$project"})
vm=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)

# States from which a VM does not recover by itself.
GONE='^(PREEMPTED|TERMINATED|FAILED|SUSPENDED|SUSPENDING)$'

# look NAME-OF-STEP COMMAND...: sets $state to the output of the command, or to "" if the resource does not exist.
look() {
  state=
  if [[ -n $dry_run ]]; then
    step "$@"
  elif ! state=$("${@:2}" 2>"$folder/errors"); then
    state=
    # The pattern must not match "is not found or access is unauthorized", gcloud's message for an invalid location.
    grep --quiet --extended-regexp 'NOT_FOUND|was not found' "$folder/errors" && return
    cat "$folder/errors" >&2
    fail_step "$1" "see the error of gcloud above"
  fi
}
look_for_node() { look "look for TPU VM $1" "${vm[@]}" describe "$1" "${where[@]}" '--format=value(state)'; }
# Sets $state to READY if all TPU VMs are READY, else to another state of a TPU VM, preferably "" or one of $GONE.
look_for_vm() {
  local node all=READY
  for node in "${nodes[@]}"; do
    look_for_node "$node"
    [[ -z $all || $all =~ $GONE || $state == READY ]] || all=$state
  done
  state=$all
}
look_for_queued() {
  look "look for queued resource $name" "${queue[@]}" describe "$name" "${where[@]}" '--format=value(state.state)'
}

remove() {
  local resource=("${vm[@]}")
  [[ -z $queued ]] || resource=("${queue[@]}")
  step "delete" "${resource[@]}" delete "$name" "${where[@]}" ${queued:+--force} --quiet
}

# each FUNCTION ARGUMENTS...: calls the function for every slice, with the number of the slice in $slice. The calls for
# several slices run at the same time, because the processes of a run wait for each other.
each() {
  local slice job jobs=() failed=
  for ((slice = 0; slice < slices; slice++)); do
    if ((slices == 1)) || [[ -n $dry_run ]]; then "$@"; continue; fi
    "$@" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || failed=yes; done
  [[ -z $failed ]] || exit 1
}

# at HOSTS NAME-OF-STEP COMMAND...: runs the command on hosts of the slice $slice. With several slices, sets libtpu's
# variables MEGASCALE_*, from which place.sh also computes the number of the process.
at() {
  local hosts=$1 name_of_step=$2 megascale=()
  if ((slices > 1)); then
    name_of_step+=", ${nodes[slice]}"
    megascale=(env MEGASCALE_NUM_SLICES="$slices" MEGASCALE_SLICE_ID="$slice")
    [[ -z $address ]] || megascale+=(MEGASCALE_COORDINATOR_ADDRESS="$address" MEGASCALE_PORT=8081)
  fi
  step "$name_of_step" "${vm[@]}" ssh "${nodes[slice]}" "${where[@]}" "${ssh[@]}" --worker="$hosts" \
    --command="$(quote "${megascale[@]}" "${@:3}")"
}

# Sets $address to the address of host 0 of slice 0, which runs process 0.
find_address() {
  look "look for the address of ${nodes[0]}" "${vm[@]}" describe "${nodes[0]}" "${where[@]}" \
    '--format=value(networkEndpoints[0].ipAddress)'
  address=${state:-${dry_run:+ADDRESS}}
  [[ -n $address ]] || fail_step "look for the address of ${nodes[0]}" "gcloud shows no endpoint: repeat this command"
}
copy() { # NAME-OF-STEP FILE NAME-ON-HOSTS
  local name_of_step=$1
  ((slices == 1)) || name_of_step+=", ${nodes[slice]}"
  step "$name_of_step" "${vm[@]}" scp "$2" "${nodes[slice]}:$3" "${where[@]}" "${ssh[@]}" --worker=all
}
place=(train-less/code/launch/place.sh tpu train-less/code/launch/host.sh)

# --- create the VM or use an existing one --------------------------------------------------------

bring_up() {
  local kind=look_for_vm ready=READY
  if [[ -n $queued ]]; then kind=look_for_queued ready=ACTIVE; fi
  "$kind"
  if [[ -n $queued && $state == ACTIVE ]]; then
    # A queued resource may stay ACTIVE after its TPU VM has been preempted.
    look_for_vm
    if [[ -z $state || $state =~ $GONE ]]; then state=SUSPENDED; else state=ACTIVE; fi
  fi
  if [[ $state =~ $GONE ]]; then
    say "$name is $state: deleting it"
    remove
    state=
  fi
  [[ -z $state ]] || say "$name exists"
  if [[ -z $state ]]; then
    local request=("${vm[@]}" create "$name") version=--version
    if [[ -n $queued ]]; then
      request=("${queue[@]}" create "$name" --node-id="$name") version=--runtime-version
      ((slices == 1)) || request=("${queue[@]}" create "$name" --node-count="$slices" --node-prefix="$name")
    fi
    step "create" "${request[@]}" "${where[@]}" --accelerator-type="$type" "$version=$runtime" \
      ${spot:+--spot} "${create[@]}"
  fi
  [[ -n $dry_run ]] || trap '(($? == 0)) || say "$name may cost money until it is deleted: launch/tpu.sh delete $name"' EXIT
  [[ -n $state ]] || "$kind"
  await "$kind" "$ready"
  [[ -z $queued ]] || look_for_vm
  await look_for_vm READY
}

# await LOOK STATE: polls until the resource has this state.
await() {
  while [[ -z $dry_run && $state != "$2" ]]; do
    [[ -n $state && ! $state =~ $GONE && ! $state =~ ^(STOP|DELET|HID) ]] ||
      fail_step "wait" "$name is ${state:-gone}: delete it with launch/tpu.sh delete $name, then repeat this command"
    say "$name is $state; checking again in $poll s"
    sleep "$poll"
    "$1"
  done
}

# --- the commands --------------------------------------------------------------------------------

case $action in
  run | resume)
    # Save the request before creating the VM. If a run has started already, keep its request until the new run starts.
    [[ $stage == started ]] || keep asked
    bring_up
    new=train-less/code.new
    archive=$folder/code.tar.gz
    step "pack the code of ${commit:0:12}" git -C "$root" archive --format=tar.gz --output="$archive" "$commit"
    each copy "copy the code" "$archive" train-less.tar.gz
    # Unpack the code to another folder, because a run may be active. host.sh then replaces the old code, or fails if a
    # run is active.
    each at all "unpack" bash -c "rm -rf $new && mkdir -p $new && tar -xzf train-less.tar.gz -C $new"
    each at all "install" "$new/launch/host.sh" install "$setup"
    # Put JAX's compilation cache on the storage that all hosts share, because only process 0 writes the cache.
    find_workdir "${arguments[@]}"
    shared=$(dirname "$workdir")
    [[ ! $workdir =~ ^gs://[^/]* ]] || shared=${BASH_REMATCH[0]}
    ((slices == 1)) || find_address
    # Copy the token as a file with mode 600, because all users of a machine can read command lines.
    [[ -n $dry_run ]] || (umask 077 && new_token >"$folder/token") || fault "cannot write to $folder: make it writable"
    each copy "copy the token" "$folder/token" train-less.token
    # If a host fails, stop the processes on all other hosts, which would wait for the failed host.
    if ! (each at all "start" "${place[@]}" start "$watch" "$log_dir" "$commit" "$shared/.cache/compiled-$type" \
      "$type" "$libtpu_flags" "${arguments[@]}"); then
      each at all "stop the started processes" "${place[@]}" stop "$grace"
      exit 1
    fi
    keep started
    [[ -n $dry_run ]] || say "started: launch/tpu.sh follow $name shows the log; launch/tpu.sh delete $name deletes the TPU VM"
    ;;
  status)
    if [[ -n $queued ]]; then
      look_for_queued
      [[ -n $dry_run ]] || printf 'queued resource %s: %s\n' "$name" "${state:-gone}"
    fi
    missing=
    for ((slice = 0; slice < slices; slice++)); do
      look_for_node "${nodes[slice]}"
      [[ -n $dry_run ]] || printf 'TPU VM %s: %s\n' "${nodes[slice]}" "${state:-gone}"
      if [[ -n $dry_run || $state == READY ]]; then at all "query the hosts" "${place[@]}" status; else missing=yes; fi
    done
    [[ -z $missing ]] || say "if a TPU VM is gone or preempted: launch/tpu.sh resume $name"
    ;;
  follow) at "$host" "follow" train-less/code/launch/host.sh follow ;;
  stop) each at all "stop" "${place[@]}" stop "$grace" ;;
  delete)
    if [[ -n $queued ]]; then look_for_queued; else look_for_vm; fi
    if [[ -n $dry_run || -n $state ]]; then remove; else say "$name does not exist"; fi
    keep deleted
    say "$folder/request is kept for resume"
    ;;
esac
