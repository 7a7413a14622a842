#!/usr/bin/env bash
# Installs the torch build that fits this machine into an environment. Safe to repeat.
#
#   deploy/install_torch.sh PYTHON cpu|cuda|none LOG     PYTHON: the environment's interpreter; LOG: file for pip's output
#
# No package host is named here: pip uses whatever it is configured with, and uv knows where the CPU builds are.
set -euo pipefail
# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

torch_version=2.13.0
python="${1:?python of the environment}" kind="${2:?cpu, cuda or none}" log="${3:?log file}"

pip_install() { PIP_NO_CACHE_DIR="${DVLA_BUILDING_IMAGE:-}" "$python" -m pip install --disable-pip-version-check "$@"; }
uv_install() { "$python" -m uv pip install --python "$python" "$@"; }
has_torch() { [[ $("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null) == "$torch_version"* ]]; }
sees_gpu() { "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

# The CPU build is ten times smaller, but pip's default sources do not carry it for every machine.
cpu_torch() {
    attempt "$log" "torch $torch_version, CPU build" pip_install "torch==$torch_version+cpu" && return
    say "pip's sources have no CPU build of torch $torch_version; asking uv for it"
    attempt "$log" "uv" pip_install uv &&
        attempt "$log" "torch $torch_version, CPU build" uv_install --torch-backend=cpu "torch==$torch_version" && return
    say "no CPU build to be had; taking the default one (several GB, it works without a GPU)"
    quietly "$log" "torch $torch_version" pip_install "torch==$torch_version"
}

cuda_torch() {
    quietly "$log" "torch $torch_version, CUDA build (several GB)" pip_install "torch==$torch_version"
    if [[ -n ${DVLA_BUILDING_IMAGE:-} ]] || sees_gpu; then return; fi
    say "this torch does not see the GPU (its CUDA may be newer than the driver); asking uv for the build that fits"
    attempt "$log" "uv" pip_install uv &&
        attempt "$log" "torch for this driver" \
            uv_install --torch-backend=auto --reinstall-package torch "torch==$torch_version" && sees_gpu && return
    say "torch still sees no GPU: training will run on the CPU. Update the NVIDIA driver, or set DVLA_TORCH=cpu."
}

case "$kind" in
cpu) has_torch || cpu_torch ;;
cuda) { has_torch && sees_gpu; } || cuda_torch ;;
none) ;;
*) die 2 "torch build $kind is unknown (expected cpu, cuda or none)" ;;
esac
