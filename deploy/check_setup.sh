#!/usr/bin/env bash
# Proves that set-up works on a bare Debian 12: only git, make and python3.11, in a container. Root, Debian, ~5 min.
#
#   deploy/check_setup.sh [COMMAND]     COMMAND defaults to: make setup && make setup && .venv/bin/dvla --help
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/podman.sh
source "$root/deploy/podman.sh"

command="${1:-make setup && make setup && .venv/bin/dvla --help}"
prepare_podman

environment=()
for setting in "${pip_environment[@]}"; do environment+=(-e "$setting"); done
say "a bare Debian 12, a clone of $root, and: $command"
podman run --rm --network host "${host_mounts[@]}" -v "$root/.git:/origin:ro" "${environment[@]}" \
    -e SSL_CERT_FILE=/hostcerts/ca-certificates.crt -e GIT_CONFIG_COUNT=1 -e GIT_CONFIG_KEY_0=safe.directory \
    -e GIT_CONFIG_VALUE_0='*' "$base_image" bash -ec "
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends git make python3.11-minimal python3.11 >/dev/null 2>&1
        git clone -q /origin /dvla
        cd /dvla
        $command"
