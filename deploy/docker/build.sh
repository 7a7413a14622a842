#!/usr/bin/env bash
# The steps that all role images share, one per layer. Equal steps come first and in the same order in every
# Dockerfile, so that Docker builds them once.
#
#   build.sh python                 interpreter and the environment /opt/dvla
#   build.sh torch cpu|cuda|none    the torch build
#   build.sh dependencies EXTRAS    third-party packages of the extras, such as "sim,maniskill"
#   build.sh package                the source itself
#   build.sh runtime                what the final image needs besides /opt/dvla: the interpreter and a user
set -euo pipefail
source="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
target=/opt/dvla
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive DVLA_BUILDING_IMAGE=1

apt_install() {
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    rm -rf /var/lib/apt/lists/*
}

case "${1:-}" in
python)
    apt_install ca-certificates python3.11 python3.11-venv
    python3.11 -m venv "$target"
    ;;
torch)
    [[ $2 == none ]] || bash "$source/deploy/install_torch.sh" "$target/bin/python" "$2" /tmp/torch.log
    ;;
dependencies)
    "$target/bin/python" "$source/deploy/docker/requirements.py" "$source/pyproject.toml" "$2" >/tmp/requirements.txt
    "$target/bin/pip" install --quiet -r /tmp/requirements.txt
    ;;
package)
    "$target/bin/pip" install --quiet --no-deps "$source"
    cp "$source"/deploy/docker/{health,prepare,status}.py "$target/"
    cp -r "$source/recipes" "$target/recipes"
    "$target/bin/python" -m compileall -q "$target/lib" >/dev/null || true # a few packages carry files for other Pythons
    ;;
runtime)
    apt_install ca-certificates python3.11
    # One fixed user id in all images: shared-memory files are private to it and must open in every container.
    useradd --uid 10001 --create-home --shell /usr/sbin/nologin dvla
    install -d -o dvla -g dvla /data /data/runs /data/token /data/weights
    ;;
*)
    echo "build.sh: unknown step ${1:-}" >&2
    exit 2
    ;;
esac
