#!/usr/bin/env bash
# The Python side of an image, in three layers, so that a change of source installs no package again.
#
#   install.sh dependencies EXTRAS    third-party packages of the extras, such as "sim,maniskill"
#   install.sh package                the source as a wheel, in /package
#   install.sh install                /package into /opt/dvla
set -euo pipefail
source="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
target=/opt/dvla
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

case "${1:-}" in
dependencies)
    "$target/bin/python" "$source/deploy/docker/requirements.py" "$source/pyproject.toml" "$2" >/tmp/requirements.txt
    "$target/bin/pip" install --quiet -r /tmp/requirements.txt
    ;;
package)
    "$target/bin/pip" wheel --quiet --no-deps --wheel-dir /package "$source"
    cp -r "$source/recipes" "$source"/deploy/docker/{health,prepare,status}.py /package/
    ;;
install)
    "$target/bin/pip" install --quiet --no-deps --no-index /package/*.whl
    rm /package/*.whl
    cp -r /package/. "$target/"
    rm -r /package
    ;;
*)
    echo "install.sh: unknown step ${1:-}" >&2
    exit 2
    ;;
esac
