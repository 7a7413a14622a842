"""A plan as files: a TOML recipe fragment, a compose override, or Kubernetes placement."""

from collections.abc import Sequence
from pathlib import Path

from services.cli.planning.model import Prediction, Use
from services.cli.planning.search import Plan
from services.cli.toml import dumps
from services.common.errors import ConfigError

HEAD = "Written by `dvla plan`: {rate:,.0f} env steps/s predicted, bottleneck {bottleneck}."


def write_plan(plan: Plan, path: Path) -> None:
    """By the file's name: *.toml, or *.yml and *.yaml for compose, or for Kubernetes if it says so.

    Raises ConfigError for another name, and where one machine is meant but the plan needs several.
    """
    if path.suffix not in (".toml", ".yml", ".yaml"):
        raise ConfigError(f"cannot write {str(path)!r}; expected a name that ends in .toml, .yml or .yaml")
    kubernetes = path.suffix != ".toml" and ("kubernetes" in path.name or "k8s" in path.name)
    if not kubernetes and sum(use.count for use in plan.best.uses) > 1:
        raise ConfigError(
            f"{path.name} would describe one machine, but the plan uses several; write a file such as kubernetes.yaml"
        )
    if kubernetes:
        text = kubernetes_placement(plan.best)
    elif path.suffix == ".toml":
        text = recipe_fragment(plan.best)
    else:
        text = compose_override(plan.best)
    head = HEAD.format(rate=plan.best.rate, bottleneck=plan.best.bottleneck)
    path.write_text(f"# {head}\n{text}")


def counts(best: Prediction) -> dict[str, int]:
    """Processes by role, over all nodes."""
    return {
        "sim": sum(use.count * (use.sims + use.both) for use in best.uses),
        "rollout": sum(use.count * use.processes for use in best.uses),
        "learner": best.learners,
    }


def slots(best: Prediction) -> tuple[int, int]:
    """Slots of a session and sessions of a simulator: two where one is stepped while the other waits for actions."""
    return (best.envs // 2, 2) if best.style == "apart" else (best.envs, 1)


def recipe_fragment(best: Prediction) -> str:
    """Sections to merge into a recipe."""
    each, sessions = slots(best)
    gpu = best.uses[0].node.gpus > 0
    learner = {"device": "cuda"} if gpu else {"threads": max(1, best.learners)}
    return dumps(
        {
            "run": {"sims": counts(best)["sim"], "rollouts": counts(best)["rollout"]},
            "sim": {"slots": each, "sessions": sessions, **({"device": "cuda"} if gpu else {})},
            "rollout": {"sessions_per_sim": sessions, **({"device": "cuda"} if gpu else {})},
            "learner": learner,
        }
    )


def compose_override(best: Prediction) -> str:
    """An override of docker-compose.yml for one machine; devices are handed out in order."""
    use, number = best.uses[0], counts(best)
    each, sessions = slots(best)
    learner = list(range(use.learner))
    sampling = list(range(0 if best.style == "all" else use.learner, use.node.devices))
    lines = ["services:"]
    lines += _service("sim", number["sim"], {"DVLA_SIM_SLOTS": each, "DVLA_SIM_SESSIONS": sessions}, use, sampling)
    lines += _service("rollout", number["rollout"], {"DVLA_ROLLOUT_SESSIONS_PER_SIM": sessions}, use, sampling)
    threads = {} if use.node.gpus else {"DVLA_LEARNER_THREADS": max(1, use.learner)}
    return "\n".join([*lines, *_service("learner", 1, threads, use, learner)]) + "\n"


def _service(role: str, scale: int, settings: dict[str, int], use: Use, devices: Sequence[int]) -> list[str]:
    gpu = use.node.gpus > 0
    environment = {name: str(value) for name, value in settings.items()}
    if gpu:
        environment[f"DVLA_{role.upper()}_DEVICE"] = "cuda"
    lines = [f"  {role}:", f"    scale: {scale}"]
    if environment:
        lines += ["    environment:", *(f'      {name}: "{value}"' for name, value in environment.items())]
    if not gpu:
        return [*lines, f'    cpuset: "{devices[0]}-{devices[-1]}"']
    ids = ", ".join(f'"{device}"' for device in devices)
    return [
        *lines,
        "    deploy:",
        "      resources:",
        "        reservations:",
        "          devices:",
        f"            - {{driver: nvidia, device_ids: [{ids}], capabilities: [gpu]}}",
    ]


def kubernetes_placement(best: Prediction) -> str:
    """Patches of the roles' Deployments: replicas, the kind of node, simulators beside workers, a relay a node."""
    number = counts(best)
    each, sessions = slots(best)
    sampling = sorted({use.node.name for use in best.uses if use.rollout})
    training = sorted({use.node.name for use in best.uses if use.learner})
    parts = [
        _deployment("sim", number["sim"], sampling, {"DVLA_SIM_SLOTS": each, "DVLA_SIM_SESSIONS": sessions}, "rollout"),
        _deployment("rollout", number["rollout"], sampling, {"DVLA_ROLLOUT_SESSIONS_PER_SIM": sessions}, ""),
        _deployment("learner", number["learner"], training, {}, ""),
        _deployment("store", 1, training, {}, "learner"),
        _deployment("weights", 1, training, {}, "learner"),
    ]
    if best.relay:
        parts.append(_relay(sampling))
    return "---\n".join(parts)


def _deployment(role: str, replicas: int, kinds: Sequence[str], settings: dict[str, int], beside: str) -> str:
    lines = [
        "apiVersion: apps/v1",
        "kind: Deployment",
        f"metadata: {{name: dvla-{role}}}",
        "spec:",
        f"  replicas: {replicas}",
        "  template:",
        "    spec:",
        "      affinity:",
        *_affinity(kinds, beside),
    ]
    if settings:
        env = ", ".join(f'{{name: {name}, value: "{value}"}}' for name, value in settings.items())
        lines += ["      containers:", f"        - name: {role}", f"          env: [{env}]"]
    return "\n".join(lines) + "\n"


def _affinity(kinds: Sequence[str], beside: str) -> list[str]:
    names = ", ".join(kinds)
    lines = [
        "        nodeAffinity:",
        "          requiredDuringSchedulingIgnoredDuringExecution:",
        "            nodeSelectorTerms:",
        f"              - matchExpressions: [{{key: dvla/kind, operator: In, values: [{names}]}}]",
    ]
    if beside:
        lines += [
            "        podAffinity:",
            "          preferredDuringSchedulingIgnoredDuringExecution:",
            "            - weight: 100",
            "              podAffinityTerm:",
            "                topologyKey: kubernetes.io/hostname",
            f"                labelSelector: {{matchLabels: {{app: dvla-{beside}}}}}",
        ]
    return lines


def _relay(kinds: Sequence[str]) -> str:
    return "\n".join(
        [
            "apiVersion: apps/v1",
            "kind: DaemonSet",
            "metadata: {name: dvla-relay}",
            "spec:",
            "  selector: {matchLabels: {app: dvla-relay}}",
            "  template:",
            "    metadata: {labels: {app: dvla-relay}}",
            "    spec:",
            "      affinity:",
            *_affinity(kinds, ""),
            "      containers:",
            "        - name: weights",
            "          image: dvla-weights",
            '          env: [{name: DVLA_WEIGHTS_UPSTREAM, value: "dvla-weights:50054"}]',
            "",
        ]
    )
