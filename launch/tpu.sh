#!/usr/bin/env bash
# Starts one run on a TPU VM with one or more hosts, using gcloud. See `launch/tpu.sh --help`. Needs bash 4.4.
set -uo pipefail

usage() {
  cat <<'END'
usage: launch/tpu.sh run    [options] NAME CONFIG [args...]
       launch/tpu.sh resume [options] NAME
       launch/tpu.sh status | follow | stop | delete  [options] NAME

run     creates the TPU VM NAME (or uses an existing one), waits until it is ready, copies the code of a commit to
        all hosts, installs Python and the packages, and starts `python -m MODULE --config=CONFIG args...` on
        every host, as one run that continues without the connection. Saves the request in runs/tpu-NAME; a new
        request replaces a started one only after its own run has started.
resume  repeats the saved request: on a new TPU VM after preemption, on the same one after stop. The run resumes
        from its last checkpoint.
status  prints the state of the TPU VM and of each host's process, with the last line of its log
follow  prints the log of a host as it grows; Ctrl-C does not affect the run
stop    tells the run to save and waits until it has exited
delete  deletes the TPU VM and its disks. You pay until then. NAME can be reused afterwards.

options of run:
  --type TYPE           accelerator type, such as v5litepod-16 or v6e-8 (required)
  --zone ZONE, --project PROJECT   default: gcloud's configuration at the time of run
  --runtime VERSION     VM software version (default: Google's recommendation for JAX on this type)
  --spot                use preemptible capacity
  --queued              request the VM as a queued resource, also named NAME
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
option of follow:
  --host K              number of the host (default: 0)
option of stop:
  --grace SECONDS       time to wait (default: 300)
options of all commands:
  --dry-run             print every command without running it
  -h, --help            print this text

args must contain --workdir=/DIR. With several hosts DIR must be storage that all of them mount (NFS, Filestore; not
gs://). A directory on the VM's own disk is lost on preemption.

Environment of each process:
  TRAINLESS_COORDINATOR     host:port of process 0
  TRAINLESS_NUM_PROCESSES   number of hosts
  TRAINLESS_PROCESS_ID      0, 1, ...: number of the host
  TRAINLESS_COMMIT          commit of the code, for the run's summary
Processes exit with 143 after saving on SIGTERM, and with 75 if another process is lost (no heartbeat for 60 s) or
missed the rendezvous (300 s). TRAINLESS_LOST_SECONDS and TRAINLESS_JOIN_SECONDS keep these defaults on TPU VMs.

example: launch/tpu.sh run --type v5litepod-16 --zone us-west4-a --spot --queued --setup 'mountpoint -q /mnt ||
           { sudo apt-get install -y nfs-common && sudo mount 10.0.0.2:/lab /mnt; }' \
           pod configs/wmt_ffn_res.py --config.data.source=files:/mnt/wmt --workdir=/mnt/runs/wmt
END
}

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# --- command line --------------------------------------------------------------------------------

type='' zone='' project='' runtime='' spot='' queued='' create=() setup='' log_dir=train-less/logs commit=''
module=reservoir.train poll=30 watch=15 host=0 grace=300 ssh=() stage=asked
action=${1-}
case $action in
  -h | --help) usage && exit 0 ;;
  run | resume | status | follow | stop | delete) shift ;;
  '') fault "a command is required: run, resume, status, follow, stop or delete" ;;
  *) fault "unknown command $action" ;;
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
    run:--ssh) ssh+=("$value") ;;
    run:--type) type=$value ;;
    run:--zone) zone=$value ;;
    run:--project) project=$value ;;
    run:--runtime) runtime=$value ;;
    run:--create) create+=("$value") ;;
    run:--setup) setup=$value ;;
    run:--log-dir) log_dir=$value ;;
    run:--commit) commit=$value ;;
    run:-m | run:--module) module=$value ;;
    run:--poll | resume:--poll) need_whole "$@" && poll=$value ;;
    run:--watch | resume:--watch) need_whole "$@" && watch=$value ;;
    follow:--host) need_whole "$@" && host=$value ;;
    stop:--grace) need_whole "$@" && grace=$value ;;
    *) fault "unknown option $1 of $action" ;;
  esac
  need_value "$@"
  shift 2
done
(($# >= 1)) || fault "NAME is required"
name=$1
shift
[[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || fault "NAME must be lower-case letters, digits and hyphens, not '$name'"

# The saved request for later commands. `stage` is asked, started or deleted.
folder=$root/runs/tpu-$name
request=(stage type zone project runtime spot queued create setup log_dir commit ssh arguments)
keep() {
  stage=$1
  [[ -z $dry_run ]] || return 0
  { mkdir -p "$folder" && declare -p "${request[@]}" >"$folder/request.new" &&
    mv "$folder/request.new" "$folder/request"; } || fault "cannot write to $folder"
}
need_gcloud() { [[ -n $dry_run ]] || need_program gcloud "https://cloud.google.com/sdk/docs/install"; }
thing() { printf '%s\n' "--type $type${zone:+ --zone $zone}${project:+ --project $project}${queued:+ --queued}"; }

# Sets an empty variable to gcloud's current configuration. The configuration may change before `delete`, which would
# then miss this VM or delete another one of the same name.
pin() { # VARIABLE PROPERTY
  if [[ -z ${!1} && -n $dry_run ]]; then
    step "ask which $1 gcloud is configured with" gcloud config get-value "$2"
  elif [[ -z ${!1} ]]; then
    printf -v "$1" %s "$(gcloud config get-value "$2" 2>/dev/null)"
  fi
}

if [[ $action == run ]]; then
  (($# >= 1)) || fault "CONFIG is required"
  [[ -n $type ]] || fault "--type is required, such as v5litepod-16"
  workdir=
  for ((k = 2; k <= $#; k++)); do
    case ${!k} in
      --workdir=*) workdir=${!k#*=} ;;
      --workdir) next=$((k + 1)) && workdir=${!next-} ;;
    esac
  done
  case $workdir in
    gs://*) fault "--workdir must be a directory, not $workdir: mount storage with --setup" ;;
    /*) ;;
    *) fault "--workdir=/DIR is required after CONFIG: a directory that all hosts share and that survives the TPU VM" ;;
  esac
  find_commit "$commit"
  need_committed "$1"
  if [[ -z $runtime ]]; then
    case $type in
      v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
      v5p-*) runtime=v2-alpha-tpuv5 ;;
      v6e-*) runtime=v2-alpha-tpuv6e ;;
      *) runtime=tpu-ubuntu2204-base ;;
    esac
  fi
  arguments=(-m "$module" --config="$1" "${@:2}")
  need_gcloud
  pin zone compute/zone
  pin project core/project
  if [[ -f $folder/request ]]; then
    # shellcheck source=/dev/null
    { read -r stage && read -r before; } < <(source "$folder/request" && printf '%s\n' "$stage" && thing)
    [[ $stage == deleted || $before == "$(thing)" ]] ||
      fault "$name was requested with $before; delete it first: launch/tpu.sh delete $name"
  fi
else
  (($# == 0)) || fault "$action does not take the argument $1"
  [[ -f $folder/request ]] || fault "unknown TPU VM $name: $folder/request does not exist"
  # shellcheck source=/dev/null
  source "$folder/request"
  need_gcloud
fi

# --- gcloud --------------------------------------------------------------------------------------

where=(${zone:+--zone="$zone"} ${project:+--project="$project"})
vm=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)

# look NAME-OF-STEP COMMAND...: sets $state to the output of the command, or to "" if the resource does not exist.
look() {
  local name_of_step=$1
  shift
  state=
  if [[ -n $dry_run ]]; then
    step "$name_of_step" "$@"
  elif ! state=$("$@" 2>"$folder/errors"); then
    state=
    # Does not match "is not found or access is unauthorized", gcloud's message for an inaccessible location.
    grep --quiet --extended-regexp 'NOT_FOUND|was not found' "$folder/errors" && return
    cat "$folder/errors" >&2
    fail_step "$name_of_step" "gcloud failed"
  fi
}
look_for_vm() { look "look for TPU VM $name" "${vm[@]}" describe "$name" "${where[@]}" '--format=value(state)'; }
look_for_queued() {
  look "look for queued resource $name" "${queue[@]}" describe "$name" "${where[@]}" '--format=value(state.state)'
}

remove() {
  if [[ -n $queued ]]; then
    step "delete" "${queue[@]}" delete "$name" "${where[@]}" --force --quiet
  else
    step "delete" "${vm[@]}" delete "$name" "${where[@]}" --quiet
  fi
}

# on HOSTS NAME-OF-STEP COMMAND...
on() {
  local hosts=$1 name_of_step=$2
  shift 2
  step "$name_of_step" "${vm[@]}" ssh "$name" "${where[@]}" "${ssh[@]}" --worker="$hosts" --command="$(quote "$@")"
}
place=(train-less/code/launch/place.sh tpu train-less/code/launch/host.sh)

# --- create the VM or use an existing one --------------------------------------------------------

# States from which a VM does not recover by itself.
GONE='^(PREEMPTED|TERMINATED|FAILED|SUSPENDED|SUSPENDING)$'

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
  if [[ -n $state ]]; then
    say "$name exists"
  else
    if [[ -n $queued ]]; then
      step "create" "${queue[@]}" create "$name" --node-id="$name" "${where[@]}" --accelerator-type="$type" \
        --runtime-version="$runtime" ${spot:+--spot} "${create[@]}"
    else
      step "create" "${vm[@]}" create "$name" "${where[@]}" --accelerator-type="$type" \
        --version="$runtime" ${spot:+--spot} "${create[@]}"
    fi
    "$kind"
  fi
  await "$kind" "$ready"
  if [[ -n $queued ]]; then
    look_for_vm
    await look_for_vm READY
  fi
}

# await LOOK STATE: polls until the resource has this state.
await() {
  while [[ -z $dry_run && $state != "$2" ]]; do
    [[ -n $state && ! $state =~ $GONE && ! $state =~ ^(STOP|DELET|HID) ]] ||
      fail_step "wait" "$name is ${state:-gone}"
    say "$name is $state; checking again in $poll s"
    sleep "$poll"
    "$1"
  done
}

# --- the commands --------------------------------------------------------------------------------

case $action in
  run | resume)
    # Saves the request before creating the VM. A request whose run has started is kept until the new run starts.
    [[ $stage == started ]] || keep asked
    bring_up
    new=train-less/code.new
    archive=$folder/code.tar.gz
    step "pack the code of ${commit:0:12}" git -C "$root" archive --format=tar.gz --output="$archive" "$commit"
    step "copy the code" "${vm[@]}" scp "$archive" "$name:train-less.tar.gz" "${where[@]}" "${ssh[@]}" --worker=all
    # Unpacks beside the code of a possibly active run. host.sh moves it into place, or fails if a run is active.
    on all "unpack" bash -c "rm -rf $new && mkdir -p $new && tar -xzf train-less.tar.gz -C $new"
    on all "install" "$new/launch/host.sh" install "$setup"
    # If one host fails, stops the others, which would wait for it.
    if ! (on all "start" "${place[@]}" start "$watch" "$log_dir" "$commit" "${arguments[@]}"); then
      on all "stop the started processes" "${place[@]}" stop "$grace"
      exit 1
    fi
    keep started
    [[ -n $dry_run ]] || say "started: launch/tpu.sh follow $name shows the log; finally, launch/tpu.sh delete $name"
    ;;
  status)
    if [[ -n $queued ]]; then
      look_for_queued
      [[ -n $dry_run ]] || printf 'queued resource %s: %s\n' "$name" "${state:-gone}"
    fi
    look_for_vm
    [[ -n $dry_run ]] || printf 'TPU VM %s: %s\n' "$name" "${state:-gone}"
    if [[ -n $dry_run || $state == READY ]]; then
      on all "query the hosts" "${place[@]}" status
    else
      say "if it is gone or preempted: launch/tpu.sh resume $name"
    fi
    ;;
  follow) on "$host" "follow" train-less/code/launch/host.sh follow ;;
  stop) on all "stop" "${place[@]}" stop "$grace" ;;
  delete)
    if [[ -n $queued ]]; then look_for_queued; else look_for_vm; fi
    if [[ -n $dry_run || -n $state ]]; then remove; else say "$name does not exist"; fi
    keep deleted
    say "$folder/request is kept for resume"
    ;;
esac
