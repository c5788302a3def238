# shellcheck shell=bash disable=SC2034
# What the launchers share; sourced by them. Messages go to stderr, so that stdout is free for what was asked for.

launcher=launch/$(basename "$0")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# What the user got wrong: one line, exit code 2.
fault() {
  printf 'error: %s (see %s --help)\n' "$1" "$launcher" >&2
  exit 2
}

say() { printf '[launch] %s\n' "$1" >&2; }

# The arguments as one line of shell. Single quotes, which every shell reads, rather than %q, whose $'...' only some do.
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

# Whether the option in front of the rest of the command line has a value behind it.
need_value() { (($# >= 2)) || fault "$1 needs a value"; }

need_whole() { [[ $2 =~ ^[0-9]+$ ]] || fault "$1 must be a whole number, not '$2'"; }

need_positive() { [[ $2 =~ ^[1-9][0-9]*$ ]] || fault "$1 must be a positive whole number, not '$2'"; }

need_program() { command -v "$1" >/dev/null || fault "there is no $1 here: $2"; }

# A step that fails ends the launcher by its name.
fail_step() {
  printf 'error: step "%s" failed: %s\n' "$1" "$2" >&2
  exit 1
}

# step NAME COMMAND...: runs it; a dry run prints it.
dry_run=
step() {
  local name_of_step=$1
  shift
  if [[ -n $dry_run ]]; then
    printf '# %s\n%s\n' "$name_of_step" "$(quote "$@")"
    return
  fi
  say "$name_of_step"
  "$@" || fail_step "$name_of_step" "exit code $?"
}

# Sets $python: $PYTHON, else the repository's environment, else python3.
find_python() {
  python=${PYTHON:-$root/.venv/bin/python}
  [[ -n ${PYTHON-} || -x $python ]] || python=python3
  command -v "$python" >/dev/null || fault "there is no $python"
}

# Sets $commit to the full name of the one that is asked for. Without one it is HEAD, which has to be all there is.
find_commit() {
  git -C "$root" rev-parse --verify --quiet HEAD >/dev/null || fault "$root is no git checkout with a commit"
  if [[ -z $1 && -n $(git -C "$root" status --porcelain --untracked-files=no) ]]; then
    fault "uncommitted changes would stay behind: commit them, or say --commit HEAD"
  fi
  commit=$(git -C "$root" rev-parse --verify --quiet "${1:-HEAD}^{commit}") || fault "there is no commit $1"
}
