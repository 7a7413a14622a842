#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that D-VLA needs. Needs root; safe to repeat; installs nothing twice.
#
#   deploy/install_system.sh [--missing] [--vulkan] [--gui] [--venv PYTHON]
#
#   --vulkan        a software Vulkan driver that ManiSkill accepts: Mesa's lavapipe, 24.3 or newer.
#                   Debian 12 has 22.3, so there it comes from backports (same mirror as the machine's own sources).
#   --gui           the X and GL client libraries that OpenCV and SAPIEN link against, also without a screen
#   --venv PYTHON   what PYTHON (such as python3.11) needs to make virtual environments
#   --missing       install nothing; exit 0 if all of this is present, 1 if not
set -euo pipefail
# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mesa_needed=24.3
mesa_package=mesa-vulkan-drivers
gui_packages=(libgl1 libglib2.0-0 libice6 libsm6 libx11-6 libxcb1 libxext6)

installed_version() { dpkg-query -W -f '${db:Status-Abbrev}${Version}' "$1" 2>/dev/null | sed -n 's/^ii *//p'; }
candidate_version() { apt-cache policy "$1" | sed -n 's/^ *Candidate: *//p' | grep -v '(none)' || true; }
mesa_ok() { [[ -n $1 ]] && dpkg --compare-versions "$1" ge "$mesa_needed~"; }
codename() { (. /etc/os-release && echo "${VERSION_CODENAME:-unknown}"); }

# A package may have been renamed (libglib2.0-0t64 provides libglib2.0-0), so ask what provides it as well.
has_package() {
    [[ -n $(installed_version "$1") || -n $(installed_version "${1}t64") ]]
}

missing_packages() {
    local package
    if $want_gui; then
        for package in "${gui_packages[@]}" libvulkan1; do has_package "$package" || echo "$package"; done
    fi
    if $want_vulkan && ! mesa_ok "$(installed_version $mesa_package)"; then echo $mesa_package; fi
    if [[ -n $venv_python ]] && ! "$venv_python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$venv_python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'
    fi
}

add_backports() {
    local release="$1" uri keyring=/usr/share/keyrings/debian-archive-keyring.gpg options=""
    [[ -z $(mirror "$release-backports") ]] || return 0
    uri="$(mirror "$release")"
    [[ -n $uri ]] || die 1 "no apt source for $release main on this machine, so the mirror for backports is unknown;" \
        "add a $release-backports source and run this again"
    [[ ! -e $keyring ]] || options="[signed-by=$keyring] "
    say "adding $release-backports from $uri (its Mesa is new enough, $release's own is not)"
    echo "deb ${options}$uri $release-backports main" >/etc/apt/sources.list.d/dvla-backports.list
    apt-get update -qq
}

# Prints the target release to install Mesa from (empty: the default one), or stops with the reason.
mesa_source() {
    local found release
    found="$(candidate_version $mesa_package)"
    if mesa_ok "$found"; then return; fi
    release="$(codename)"
    if [[ $release == bookworm ]]; then
        add_backports "$release"
        echo "$release-backports"
        return
    fi
    die 2 "ManiSkill needs a Vulkan driver from Mesa $mesa_needed or newer, and $release offers ${found:-none}." \
        "Enable this release's updates (on Ubuntu: $release-updates) or install a newer Mesa, then run this again."
}

install() {
    local packages=("$@") source=""
    say "apt-get update"
    apt-get update -qq || say "apt-get update reported errors; going on with what it has"
    if [[ " ${packages[*]} " == *" $mesa_package "* ]]; then
        source="$(mesa_source)"
        if [[ -n $source ]]; then packages=("${packages[@]/%$mesa_package/$mesa_package/$source}"); fi
    fi
    say "installing ${packages[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

want_gui=false want_vulkan=false check_only=false venv_python=""
while (($#)); do
    case "$1" in
    --vulkan) want_vulkan=true ;;
    --gui) want_gui=true ;;
    --missing) check_only=true ;;
    --venv) venv_python="${2:?--venv needs a python}" && shift ;;
    *) die 2 "install_system.sh: unknown argument $1" ;;
    esac
    shift
done

if ! command -v apt-get >/dev/null; then
    # Not a Debian: setup.sh tries the Vulkan device itself, which is what counts.
    say "no apt-get here: install Mesa $mesa_needed or newer (Vulkan, lavapipe) and the X client libraries yourself"
    exit 0
fi
mapfile -t missing < <(missing_packages)
if ! ((${#missing[@]})); then exit 0; fi
if $check_only; then
    echo "${missing[*]}"
    exit 1
fi
[[ $(id -u) -eq 0 ]] || die 2 "installing ${missing[*]} needs root: sudo $0 (with the same arguments)"
install "${missing[@]}"
