#!/usr/bin/env bash
# The system side of an image.
#
#   python.sh environment    interpreter and an empty environment, /opt/dvla
#   python.sh runtime        what the final image needs besides /opt/dvla: the interpreter and a user
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

apt_install() {
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends ca-certificates "$@" >/dev/null
    rm -rf /var/lib/apt/lists/*
}

case "${1:-}" in
environment)
    apt_install python3.11 python3.11-venv
    python3.11 -m venv /opt/dvla
    ;;
runtime)
    apt_install python3.11
    # One fixed user id in all images: shared-memory files are private to it and must open in every container.
    useradd --uid 10001 --create-home --shell /usr/sbin/nologin dvla
    install -d -o dvla -g dvla /data /data/runs /data/token /data/weights
    ;;
*)
    echo "python.sh: unknown step ${1:-}" >&2
    exit 2
    ;;
esac
