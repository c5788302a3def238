#!/usr/bin/env bash
# One run on a TPU VM, of one host or many, by gcloud. `launch/tpu.sh --help` explains; needs bash 4.4.
set -uo pipefail

usage() {
  cat <<'END'
usage: launch/tpu.sh run    [options] NAME CONFIG [args...]
       launch/tpu.sh resume [options] NAME
       launch/tpu.sh status | follow | stop | delete  [options] NAME

run     creates the TPU VM called NAME, or takes the one that is there; waits until it is ready; copies the code
        of a commit to all hosts; installs Python and the packages; starts `python -m MODULE --config=CONFIG
        args...` on every host, as one run that outlives the connection. The request is kept in runs/tpu-NAME;
        one of which a run was started gives way to another when that has started.
resume  the same once more for that request: after a preemption on a new TPU VM, after stop on the same one.
        The run goes on from its last checkpoint.
status  the state of the TPU VM and, where it is ready, of each host's process, with its last line
follow  shows the log of a host as it grows; Ctrl-C ends only the showing
stop    tells the run to save itself and waits until it has ended
delete  gives the TPU VM back, with all that lies on its disks. You pay until then. NAME is then free for another.

of run:
  --type TYPE           accelerator type, such as v5litepod-16 or v6e-8 (needed)
  --zone ZONE, --project PROJECT   where (default: what gcloud is configured with then)
  --runtime VERSION     software of the VM (default: the one that Google names for JAX on that type)
  --spot                cheap, and may be preempted at any time
  --queued              ask by a queued resource, called NAME too, which waits until there is room
  --create OPTION       one more option for gcloud's create, as often as needed: --create --network=lab
  --setup COMMAND       run on each host before the packages are installed, such as mounting a disk; by resume
                        once more, which it has to bear
  --log-dir DIR         where process-K.log goes on host K (default: train-less/logs in its home)
  --commit COMMIT       the code to run (default: HEAD, if no file differs from it)
  --ssh OPTION          one more option for gcloud's ssh and scp, as often as needed: --ssh --internal-ip
  -m, --module MODULE   what each host runs (default: reservoir.train)
of run and resume:
  --poll SECONDS        how often to look whether the TPU VM is ready (default: 30)
  --watch SECONDS       how long to see whether the started processes go on; where one fails, the others are
                        ended (default: 15)
of follow:
  --host K              whose log (default: 0)
of stop:
  --grace SECONDS       how long to wait (default: 300)
of all:
  --dry-run             print every command and run none
  -h, --help            this text

The run's folder has to be named, by --workdir=/DIR among args: with several hosts on storage that all of them
mount (NFS, Filestore; gs:// does not work), and it is only there after a preemption if it is not a disk of the VM.

Each process finds in its environment
  TRAINLESS_COORDINATOR     host:port of process 0
  TRAINLESS_NUM_PROCESSES   how many hosts there are
  TRAINLESS_PROCESS_ID      0, 1, ...: the number of its host
  TRAINLESS_COMMIT          the commit of the code, for the run's summary
It ends with exit code 143 when it was told to stop and has saved, and 75 when another one is lost or never came:
silent for 60 s, or not there 300 s after its start (what TRAINLESS_LOST_SECONDS and TRAINLESS_JOIN_SECONDS change
where they are set, is not changed here).

example: launch/tpu.sh run --type v5litepod-16 --zone us-west4-a --spot --queued --setup 'mountpoint -q /mnt ||
           { sudo apt-get install -y nfs-common && sudo mount 10.0.0.2:/lab /mnt; }' \
           pod configs/wmt_ffn_res.py --config.data.source=files:/mnt/wmt --workdir=/mnt/runs/wmt
END
}

# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# --- what is asked for ---------------------------------------------------------------------------

type='' zone='' project='' runtime='' spot='' queued='' create=() setup='' log_dir=train-less/logs commit=''
module=reservoir.train poll=30 watch=15 host=0 grace=300 ssh=() stage=asked
action=${1-}
case $action in
  -h | --help) usage && exit 0 ;;
  run | resume | status | follow | stop | delete) shift ;;
  '') fault "a command is needed: run, resume, status, follow, stop or delete" ;;
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
(($# >= 1)) || fault "NAME is needed"
name=$1
shift
[[ $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] || fault "NAME must be lower-case letters, digits and hyphens, not '$name'"

# What every later command needs to know. `stage` is asked, started or deleted: how far the request has come.
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

# Sets a variable that is empty to what gcloud is configured with now, which may be something else by the time of
# `delete`: another thing of that name would be deleted, or nothing found while this one is paid for.
pin() { # VARIABLE PROPERTY
  if [[ -z ${!1} && -n $dry_run ]]; then
    step "ask which $1 gcloud is configured with" gcloud config get-value "$2"
  elif [[ -z ${!1} ]]; then
    printf -v "$1" %s "$(gcloud config get-value "$2" 2>/dev/null)"
  fi
}

if [[ $action == run ]]; then
  (($# >= 1)) || fault "CONFIG is needed"
  [[ -n $type ]] || fault "--type is needed, such as v5litepod-16"
  workdir=
  for ((k = 2; k <= $#; k++)); do
    case ${!k} in
      --workdir=*) workdir=${!k#*=} ;;
      --workdir) next=$((k + 1)) && workdir=${!next-} ;;
    esac
  done
  case $workdir in
    gs://*) fault "--workdir must be a folder, and $workdir is none: mount storage by --setup" ;;
    /*) ;;
    *) fault "--workdir=/DIR is needed behind CONFIG: a folder that all hosts have and that outlives the TPU VM" ;;
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
      fault "$name was asked for by $before; delete it first: launch/tpu.sh delete $name"
  fi
else
  (($# == 0)) || fault "$action takes no $1"
  [[ -f $folder/request ]] || fault "nothing is known of $name: $folder/request is missing"
  # shellcheck source=/dev/null
  source "$folder/request"
  need_gcloud
fi

# --- gcloud --------------------------------------------------------------------------------------

where=(${zone:+--zone="$zone"} ${project:+--project="$project"})
vm=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)

# look NAME-OF-STEP COMMAND...: sets $state to what it prints; empty where there is no such thing.
look() {
  local name_of_step=$1
  shift
  state=
  if [[ -n $dry_run ]]; then
    step "$name_of_step" "$@"
  elif ! state=$("$@" 2>"$folder/errors"); then
    state=
    # Not "is not found or access is unauthorized", which gcloud says of a place.
    grep --quiet --extended-regexp 'NOT_FOUND|was not found' "$folder/errors" && return
    cat "$folder/errors" >&2
    fail_step "$name_of_step" "gcloud has no answer"
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

# --- create, or take what is there ---------------------------------------------------------------

# What has been preempted never comes back by itself.
GONE='^(PREEMPTED|TERMINATED|FAILED|SUSPENDED|SUSPENDING)$'

bring_up() {
  local kind=look_for_vm ready=READY
  if [[ -n $queued ]]; then kind=look_for_queued ready=ACTIVE; fi
  "$kind"
  if [[ -n $queued && $state == ACTIVE ]]; then
    # It may go on saying so after its TPU VM has been preempted.
    look_for_vm
    if [[ -z $state || $state =~ $GONE ]]; then state=SUSPENDED; else state=ACTIVE; fi
  fi
  if [[ $state =~ $GONE ]]; then
    say "it is $state"
    remove
    state=
  fi
  if [[ -n $state ]]; then
    say "it is there"
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

# await LOOK STATE: looks until it has that state.
await() {
  while [[ -z $dry_run && $state != "$2" ]]; do
    [[ -n $state && ! $state =~ $GONE && ! $state =~ ^(STOP|DELET|HID) ]] ||
      fail_step "wait" "$name is ${state:-gone}"
    say "$name is $state; looking again in $poll s"
    sleep "$poll"
    "$1"
  done
}

# --- the commands --------------------------------------------------------------------------------

case $action in
  run | resume)
    # What is created has to be known from now on. But a request of which a run was started is the one that resume
    # goes on with, until another run has started.
    [[ $stage == started ]] || keep asked
    bring_up
    new=train-less/code.new
    archive=$folder/code.tar.gz
    step "pack the code of ${commit:0:12}" git -C "$root" archive --format=tar.gz --output="$archive" "$commit"
    step "copy the code" "${vm[@]}" scp "$archive" "$name:train-less.tar.gz" "${where[@]}" "${ssh[@]}" --worker=all
    # Beside the code of a run that may be going on; host.sh puts it in place, or refuses.
    on all "unpack" bash -c "rm -rf $new && mkdir -p $new && tar -xzf train-less.tar.gz -C $new"
    on all "install" "$new/launch/host.sh" install "$setup"
    # Hosts that did start would wait for the others.
    if ! (on all "start" "${place[@]}" start "$watch" "$log_dir" "$commit" "${arguments[@]}"); then
      on all "stop what has started" "${place[@]}" stop "$grace"
      exit 1
    fi
    keep started
    [[ -n $dry_run ]] || say "started: launch/tpu.sh follow $name; in the end: launch/tpu.sh delete $name"
    ;;
  status)
    if [[ -n $queued ]]; then
      look_for_queued
      [[ -n $dry_run ]] || printf 'queued resource %s: %s\n' "$name" "${state:-gone}"
    fi
    look_for_vm
    [[ -n $dry_run ]] || printf 'TPU VM %s: %s\n' "$name" "${state:-gone}"
    if [[ -n $dry_run || $state == READY ]]; then
      on all "ask the hosts" "${place[@]}" status
    else
      say "once it is gone or preempted: launch/tpu.sh resume $name"
    fi
    ;;
  follow) on "$host" "follow" train-less/code/launch/host.sh follow ;;
  stop) on all "stop" "${place[@]}" stop "$grace" ;;
  delete)
    if [[ -n $queued ]]; then look_for_queued; else look_for_vm; fi
    if [[ -n $dry_run || -n $state ]]; then remove; else say "it is gone"; fi
    keep deleted
    say "$folder/request stays, for resume"
    ;;
esac
