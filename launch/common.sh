# shellcheck shell=bash disable=SC2034
# Functions that the launchers share. They print messages to stderr and results to stdout.

launcher=launch/$(basename "$0")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Reports a usage error in one line and exits with code 2.
fault() {
  printf 'error: %s (see %s --help)\n' "$1" "$launcher" >&2
  exit 2
}

say() { printf '[launch] %s\n' "$1" >&2; }

# Quotes the arguments as one line of shell, with single quotes, because some shells do not understand %q's $'...'.
quote() {
  local argument separator=
  for argument; do
    if [[ $argument =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
      printf '%s%s' "$separator" "$argument"
    else
      printf "%s'%s'" "$separator" "${argument//\'/\'\\\'\'}"
    fi
    separator=' '
  done
}

# Rejects options of the launcher after CONFIG, because they would go to the program without a message. Finds the
# launcher's options in its help text.
need_no_options() { # ARGUMENT...
  local argument options
  options=$(usage | grep '^  -' | sed 's/\(.\)   .*/\1/' | grep --only-matching --extended-regexp -e '-[a-z-]+')
  for argument; do
    [[ $argument != -* || $'\n'$options$'\n' != *$'\n'"${argument%%=*}"$'\n'* ]] ||
      fault "${argument%%=*} is an option of the launcher: give it before CONFIG"
  done
}

# Checks that the option $1 has a value, $2.
need_value() { (($# >= 2)) || fault "$1 needs a value"; }

need_whole() {
  need_value "$@"
  [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] || fault "$1 must be 0 or a positive whole number without leading zeros, not '$2'"
}

need_positive() {
  need_value "$@"
  [[ $2 =~ ^[1-9][0-9]*$ ]] || fault "$1 must be a positive whole number without leading zeros, not '$2'"
}

# Checks that the GPUs are different and that COUNT processes can share them evenly.
need_gpus() { # COUNT GPU...
  local count=$1
  shift
  [[ -z $(printf '%s\n' "$@" | sort | uniq --repeated) ]] || fault "the list of GPUs $* repeats a GPU: list each GPU once with --gpus"
  (($# % count == 0)) ||
    fault "$count processes cannot share the $# GPUs $* evenly: change --gpus or the number of processes"
}

# Checks that the value of option $1 is itself an option, to pass on to another program.
need_option() {
  need_value "$@"
  [[ $2 == -* ]] || fault "$1 must be followed by an option, such as $1 --name=value, not '$2'"
}

need_program() { command -v "$1" >/dev/null || fault "$1 is not installed: $2"; }

# Reports a failed step by its name and exits with code 1.
fail_step() {
  printf 'error: step "%s" failed: %s\n' "$1" "$2" >&2
  exit 1
}

# step NAME COMMAND...: runs the command, or prints it in a dry run.
dry_run=
step() {
  local name_of_step=$1
  shift
  if [[ -n $dry_run ]]; then
    printf '# %s\n%s\n' "$name_of_step" "$(quote "$@")"
    return
  fi
  say "$name_of_step"
  "$@" || fail_step "$name_of_step" "exit code $?, see the messages above"
}

# Prints a random token. Process 0 of a run refuses connections without this token.
new_token() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n'; }

# Creates the new directory $log_dir. Two commands in the same second have the same default, so the second command adds
# -2 to the name.
create_log_dir() {
  local wanted=$log_dir number=1
  mkdir -p "$(dirname "$wanted")" 2>/dev/null
  until mkdir "$log_dir" 2>/dev/null; do
    [[ -e $log_dir ]] || fault "cannot create $log_dir: choose another directory with --log-dir"
    number=$((number + 1))
    log_dir=$wanted-$number
  done
}

# Sets $python to $PYTHON. Without $PYTHON, to the repository's .venv/bin/python, or to python3 if .venv is missing.
find_python() {
  python=${PYTHON:-$root/.venv/bin/python}
  [[ -n ${PYTHON-} || -x $python ]] || python=python3
  command -v "$python" >/dev/null || fault "Python interpreter $python not found: set PYTHON to an interpreter"
  # Make a relative path absolute, because the program may start in another directory.
  [[ $python != */* || $python == /* ]] || python=$PWD/$python
}

# Sets $commit to the full hash of commit $1. An empty $1 means HEAD; then uncommitted changes to tracked files are an
# error.
find_commit() {
  git -C "$root" rev-parse --verify --quiet HEAD >/dev/null ||
    fault "$root is not a git checkout with a commit: clone the repository with git"
  if [[ -z $1 && -n $(git -C "$root" status --porcelain --untracked-files=no) ]]; then
    fault "uncommitted changes would not be copied: commit them, or pass --commit HEAD"
  fi
  commit=$(git -C "$root" rev-parse --verify --quiet "${1:-HEAD}^{commit}") ||
    fault "unknown commit $1: give --commit a commit of $root"
}

# Checks that the file of CONFIG $1 exists.
need_file() { [[ -f ${1%%:*} ]] || fault "no file ${1%%:*}: give the path of a configuration file"; }

# Checks that $commit contains the file of CONFIG $1, unless its path is absolute. A relative path is relative to the
# repository root.
need_committed() {
  local file=${1%%:*}
  [[ $file == /* ]] || git -C "$root" cat-file -e "$commit:./$file" 2>/dev/null ||
    fault "no file $file in commit ${commit:0:12}: give a path relative to the repository root, and commit the file"
}
