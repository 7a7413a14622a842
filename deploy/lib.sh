# shellcheck shell=bash
# Shared by the set-up scripts; sourced, never run. Plain messages to stderr, so that stdout stays usable.

say() { echo "setup: $*" >&2; }

# die CODE MESSAGE... : one clear line (or a few) and an exit code. 2 means "the user has to do something".
die() {
    local code="$1"
    shift
    echo "setup: $*" >&2
    exit "$code"
}

# Runs a command as root: directly, or through sudo where that needs no password.
as_root() {
    if [[ $(id -u) -eq 0 ]]; then "$@"; else sudo -n "$@"; fi
}

can_be_root() {
    [[ $(id -u) -eq 0 ]] || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }
}

has_nvidia_driver() {
    [[ -e /proc/driver/nvidia/version ]] || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
}

# attempt LOG WHAT COMMAND... : keeps a command's output in LOG and says how long it took. Silent if it fails.
attempt() {
    local log="$1" what="$2" began=$SECONDS
    shift 2
    say "$what ..."
    "$@" </dev/null >>"$log" 2>&1 || return 1
    say "$what: done in $((SECONDS - began)) s"
}

# quietly LOG WHAT COMMAND... : the same, but a failure shows the end of the log.
quietly() {
    attempt "$@" && return
    tail -n 25 "$1" >&2
    say "failed: $2 (the whole log: $1)"
    return 1
}

# mirror RELEASE : the URI that serves this release's main component here, so that a local mirror stays in use.
mirror() {
    # shellcheck disable=SC2016 # apt expands these, not the shell
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk -v release="$1" '$2 == release && $3 == "main" { print $1; exit }'
}
