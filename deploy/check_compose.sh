#!/usr/bin/env bash
# Runs docker-compose.yml for real, in podman: builds all images, starts three simulators and two rollout workers,
# waits until the learner has made some updates with all of them at work, restarts one simulator, and takes it down.
# Root on Debian; needs no Docker and no image registry. About 15 minutes on two cores, most of it building.
#
#   deploy/check_compose.sh            everything; RECIPE=... and UPDATES=... (default 3) as environment, BUILT=1
#                                      to check the images that are there, OVERRIDE=... one more compose file
#   deploy/check_compose.sh --keep     the same, but leave it running (then: deploy/check_compose.sh --down)
#   deploy/check_compose.sh --down     take it down with its volumes
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/podman.sh
source "$root/deploy/podman.sh"
cd "$root"

project=dvla-check
updates="${UPDATES:-3}"
export RUN="${RUN:-check}" RECIPE="${RECIPE:-pushcube.toml}"
redis_image="$(sed -n 's/^ *image: *\(.*redis:.*\)/\1/p' docker-compose.yml)"
export BUILDAH_FORMAT=docker # the OCI format has no health checks

compose() {
    "$scratch/compose/bin/podman-compose" -p "$project" \
        -f docker-compose.yml ${OVERRIDE:+-f "$OVERRIDE"} -f "$scratch/scale.yml" \
        --podman-build-args "--network host ${host_mounts[*]}" "$@"
}

install_compose() {
    [[ -x $scratch/compose/bin/podman-compose ]] && return
    python3 -m venv "$scratch/compose"
    "$scratch/compose/bin/pip" install --quiet --disable-pip-version-check podman-compose
}

# The image that compose names, made from Debian's own package, with the user and folder of the original.
make_redis_image() {
    if podman image exists "$redis_image"; then return; fi
    say "making $redis_image from Debian's redis-server"
    podman build --quiet --network host -t "$redis_image" - >/dev/null <<DOCKERFILE
FROM $base_image
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server >/dev/null \
    && install -d -o redis -g redis /data
USER redis
WORKDIR /data
DOCKERFILE
}

# What `--scale sim=3 --scale rollout=2` does; podman-compose takes the flag for one service only. More updates than the
# check waits for, so that the run does not end under it. And podman 4 knows a tmpfs volume's size only as a quota of XFS.
write_scale() {
    cat >"$scratch/scale.yml" <<'YAML'
services:
  sim: { scale: 3 }
  rollout: { scale: 2 }
  learner: { environment: { DVLA_LEARNER_UPDATES: "1000" } }
volumes:
  shared: { driver_opts: { type: tmpfs, device: tmpfs, o: 'uid=10001,gid=10001,mode=0700' } }
YAML
}

container() { podman ps -q --filter "label=com.docker.compose.project=$project" --filter "label=com.docker.compose.service=$1"; }
in_learner() { podman exec "$(container learner)" "$@"; }
status() { in_learner python /opt/dvla/status.py --json 2>/dev/null || true; }

# ask EXPRESSION : a Python expression over `roles`, the parsed status; prints its value.
ask() {
    status | python3 -c "
import json, sys
text = sys.stdin.read()
roles = json.loads(text) if text.strip() else {}
good = lambda role: [answer for answer in roles.get(role, {}).values() if 'error' not in answer]
print($1)"
}

trained() { in_learner sh -c "cat /data/runs/$RUN/metrics.jsonl 2>/dev/null" | wc -l; }
working_sims() { ask "sum(answer['metrics'].get('env_steps', 0) > 0 for answer in good('sim'))"; }

# wait_for SECONDS WHAT COMMAND... : until the command succeeds; shows the logs if it does not.
wait_for() {
    local seconds="$1" what="$2" began=$SECONDS
    shift 2
    say "waiting for: $what"
    until "$@"; do
        if ((SECONDS - began > seconds)); then
            podman ps -a --filter "label=com.docker.compose.project=$project" >&2
            for name in sim rollout store learner weights; do podman logs --tail 20 "$(container $name | head -1)" >&2 || true; done
            die 1 "not within $seconds s: $what"
        fi
        sleep 3
    done
    say "$what: after $((SECONDS - began)) s"
}

all_serve() { [[ $(ask "len(good('sim')), len(good('rollout')), len(good('store')), len(good('weights')), len(good('learner'))") == "3 2 1 1 1" ]]; }
enough_updates() { (($(trained) >= updates)); }
all_sims_work() { [[ $(working_sims) == 3 ]]; }
healthy() { for id in $(container sim) $(container store) $(container learner); do podman healthcheck run "$id" >/dev/null || return 1; done; }
restarted_sim_works() { all_serve && all_sims_work; }

# Docker restarts it by the compose file's policy; podman without systemd may only notice that it died.
kill_a_sim() {
    local victim
    victim="$(container sim | head -1)"
    kill -KILL "$(podman inspect --format '{{.State.Pid}}' "$victim")"
    sleep 15
    if [[ $(podman inspect --format '{{.State.Running}}' "$victim") != true ]]; then
        say "podman did not restart the killed simulator by its policy; starting it"
        podman start "$victim" >/dev/null
    fi
}

take_down() {
    compose down --volumes --timeout 20 >/dev/null 2>&1 || true
    say "taken down"
}

exited_well() {
    local labels=(--filter "label=com.docker.compose.project=$project" --filter "label=com.docker.compose.service=$1")
    [[ $(podman ps -a "${labels[@]}" --format '{{.Status}}') == "Exited (0)"* ]]
}

# In the order of depends_on, one after the other: podman 4 forgets the exit code of a container after five minutes, and
# podman-compose then waits for it for ever. And without systemd nobody runs health checks but us.
start() {
    compose up -d --no-build --no-deps "$@" >>"$scratch/up.log" 2>&1 || { tail -n 40 "$scratch/up.log" >&2 && die 1 "start failed"; }
}

start_all() {
    : >"$scratch/up.log"
    start token redis
    wait_for 60 "token" exited_well token
    wait_for 60 "Redis is healthy" podman healthcheck run "$(container redis)"
    start demos
    wait_for 1200 "demonstrations" exited_well demos
    start warmstart
    wait_for 1200 "warm start" exited_well warmstart
    start sim store weights rollout learner
}

build() {
    say "building the images"
    compose --parallel 1 build store weights learner rollout sim >"$scratch/build.log" 2>&1 ||
        { tail -n 40 "$scratch/build.log" >&2 && die 1 "build failed"; }
}

check() {
    [[ -n ${BUILT:-} ]] || build
    say "starting; demonstrations and warm start come first"
    start_all
    wait_for 900 "3 sims, 2 rollout workers, store, weights and learner serve" all_serve
    wait_for 300 "health checks pass" healthy
    wait_for 900 "$updates updates trained" enough_updates
    wait_for 300 "all three simulators work" all_sims_work
    kill_a_sim
    wait_for 300 "the killed simulator is back and works" restarted_sim_works
    updates=$(($(trained) + 2))
    wait_for 600 "two more updates" enough_updates
    in_learner python /opt/dvla/status.py
}

prepare_podman
install_compose
write_scale
for setting in "${pip_environment[@]}"; do export "${setting?}"; done
case "${1:-}" in
--down) take_down ;;
--keep)
    make_redis_image
    check
    ;;
"")
    make_redis_image
    trap take_down EXIT
    check
    say "docker-compose.yml works"
    ;;
*) die 2 "unknown argument $1 (expected --keep, --down or none)" ;;
esac
