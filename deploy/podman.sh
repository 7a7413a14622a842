# shellcheck shell=bash
# Runs containers for the checks on a Debian machine without a Docker engine or an image registry. Sourced, never run.
# Gives: `containers` (the podman to call), `host_mounts` (arguments that pass this machine's certificates and
# package folders into a container) and `base_image`.

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

base_image=docker.io/library/debian:bookworm-slim
scratch="${DVLA_CHECK_FOLDER:-/var/tmp/dvla-check}"
mkdir -p "$scratch"

install_podman() {
    local packages=(podman runc netavark aardvark-dns containernetworking-plugins iptables debootstrap) package missing=()
    for package in "${packages[@]}"; do dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package"); done
    ((${#missing[@]})) || return 0
    [[ $(id -u) -eq 0 ]] || die 2 "installing ${missing[*]} needs root"
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# crun refuses the hybrid cgroups that some machines have, and a sandbox may not raise the default limits.
configure_podman() {
    cat >"$scratch/containers.conf" <<'CONF'
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=1000:1000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
CONF
    export CONTAINERS_CONF="$scratch/containers.conf"
}

# No registry needed: the base image is made from the machine's own package mirror.
make_base_image() {
    if podman image exists "$base_image"; then return; fi
    local uri root="$scratch/bookworm"
    uri="$(mirror bookworm)"
    [[ -n $uri ]] || uri="$(mirror "$(. /etc/os-release && echo "$VERSION_CODENAME")")"
    [[ -n $uri ]] || die 2 "this machine has no Debian package source to make $base_image from"
    say "making $base_image with debootstrap"
    rm -rf "$root"
    debootstrap --variant=minbase --include=ca-certificates bookworm "$root" "$uri" >"$scratch/debootstrap.log"
    tar -C "$root" -c . | podman import --quiet - "$base_image" >/dev/null
    rm -rf "$root"
}

pip_setting() { python3 -m pip config get "$1" 2>/dev/null || true; }

# Package installs inside a container see the same sources as this machine: its certificate store (it may sit behind
# a proxy with a certificate of its own) and the wheel folders that pip is configured with.
find_host_mounts() {
    host_mounts=(-v /etc/ssl/certs:/hostcerts:ro)
    pip_environment=(PIP_CERT=/hostcerts/ca-certificates.crt PIP_DEFAULT_TIMEOUT=180)
    local links extra place
    links="${PIP_FIND_LINKS:-$(pip_setting global.find-links)}"
    extra="${PIP_EXTRA_INDEX_URL:-$(pip_setting global.extra-index-url)}"
    [[ -z $links ]] || pip_environment+=("PIP_FIND_LINKS=$links")
    [[ -z $extra ]] || pip_environment+=("PIP_EXTRA_INDEX_URL=$extra")
    for place in $links $extra; do
        place="${place#file://}"
        [[ $(basename "$place") != simple ]] || place="$(dirname "$place")" # an index's files lie beside its pages
        if [[ -d $place ]]; then host_mounts+=(-v "$place:$place:ro"); fi
    done
}

prepare_podman() {
    install_podman
    configure_podman
    make_base_image
    find_host_mounts
}
