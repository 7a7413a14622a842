#!/usr/bin/env bash
# Makes .venv-rlinf, the environment of the RLinf comparison (a few GB). Safe to repeat.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-rlinf
[[ -e $venv/.ready ]] && exit 0
"${PYTHON:-python3.11}" -m venv "$venv"
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 # first: a plain torch requirement would bring gigabytes of CUDA builds
"${pip[@]}" 'ray[default]' 'hydra-core<1.4.0.dev8' numpy scipy accelerate einops sortedcontainers tensorboard \
    icmplib gymnasium imageio 'transformers==4.57.6' 'huggingface_hub<1.0'
"${pip[@]}" --no-deps rlinf==0.3.0
touch "$venv/.ready"
