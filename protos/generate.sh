#!/usr/bin/env bash
# Generates protos/gen from protos/dvla/v1/*.proto. `--check` compares instead and exits 1 on a difference.
#
#   protos/generate.sh            write protos/gen
#   protos/generate.sh --check    fail if protos/gen is not what the .proto files give
#   protos/generate.sh --tools    only make the generator's environment
#
# The generator lives in an environment of its own (.venv-protos): its pinned release wants an older protobuf
# than the services run on. The pin is deliberate: code from grpcio-tools 1.73.1 carries gencode 6.31, which
# protobuf 6.31 to 7.x can load, while newer tools write code that refuses older runtimes.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
tools="${DVLA_PROTO_TOOLS:-$root/.venv-protos}"
pins=(grpcio-tools==1.73.1 grpcio==1.80.0 protobuf==6.33.6 setuptools==80.9.0 mypy-protobuf==5.1.0)

die() { echo "protos/generate.sh: $*" >&2; exit 1; }

make_tools() {
    local stamp="$tools/.pins" python
    if [[ -f $stamp && "$(cat "$stamp")" == "${pins[*]}" ]]; then return; fi
    exec 9>"$root/.venv-protos.lock"
    flock 9 # tests on several cores may get here at the same time
    if [[ ! -f $stamp || "$(cat "$stamp")" != "${pins[*]}" ]]; then
        python="$root/.venv/bin/python"
        [[ -x $python ]] || python="$(command -v python3.11 || command -v python3.12)" || die "needs python3.11 or 3.12"
        echo "making the proto generator in $tools (${pins[*]})" >&2
        rm -rf "$tools"
        "$python" -m venv "$tools"
        "$tools/bin/pip" install --quiet --disable-pip-version-check "${pins[@]}" >&2
        echo "${pins[*]}" >"$stamp"
    fi
    exec 9>&-
}

# Writes stubs, their types and the package files into the folder $1.
generate() {
    local out="$1"
    mkdir -p "$out/dvla/v1"
    (
        cd "$root/protos"
        shopt -s nullglob
        files=(dvla/v1/*.proto)
        ((${#files[@]})) || die "no .proto files in protos/dvla/v1"
        PATH="$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc --proto_path=. \
            --python_out="$out" --grpc_python_out="$out" \
            --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" "${files[@]}"
    )
    for folder in "$out/dvla" "$out/dvla/v1"; do
        echo '"""Generated from protos/dvla/v1 by protos/generate.sh. Do not edit."""' >"$folder/__init__.py"
        touch "$folder/py.typed"
    done
    drop_empty_services "$out"
}

# protoc writes *_pb2_grpc files also for files without a service; an empty module only misleads.
drop_empty_services() {
    local proto stem
    for proto in "$root"/protos/dvla/v1/*.proto; do
        if ! grep -q '^service ' "$proto"; then
            stem="$1/dvla/v1/$(basename "$proto" .proto)"
            rm -f "${stem}_pb2_grpc.py" "${stem}_pb2_grpc.pyi"
        fi
    done
}

main() {
    local mode="${1:-write}"
    case "$mode" in write | --check | --tools) ;; *) die "unknown argument $mode (expected --check, --tools or none)" ;; esac
    make_tools
    [[ $mode != --tools ]] || return 0
    fresh="$(mktemp -d)" # not local: the trap reads it after main returns
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh"
    if [[ $mode == --check ]]; then
        diff -r --exclude=__pycache__ "$root/protos/gen" "$fresh" ||
            die "protos/gen is not what the .proto files give; run 'make protos' and commit the result"
    else
        mkdir -p "$root/protos/gen"
        rm -rf "$root/protos/gen/dvla"
        cp -r "$fresh/dvla" "$root/protos/gen/dvla"
        echo "wrote protos/gen"
    fi
}

main "$@"
