"""Measures what one recipe costs on this machine, part by part, in this process. Imports torch."""

import copy
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from services.cli.recipe import Recipe
from services.common import bundle
from services.common.bundle import Version
from services.common.emulated import MARK
from services.common.spec import Array, FloatArray, SimSpec
from services.common.trajectory import Trajectory, instruction_array
from services.learner.batch import build_batch
from services.learner.config import LearnerConfig
from services.learner.episodes import Member, PreparedGroup, prepare_group
from services.learner.lineage import Lineage
from services.learner.snapshot import layout_of
from services.learner.update import Updater
from services.policies.base import Policy, numpy_record
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.registry import build_policy
from services.sim.chunks import ChunkRunner
from services.sim.config import build_sim
from services.sim.vector import Start

QUICK_GROUPS = 1
EPISODE_CHUNKS = 64
"""Chunks of an episode that the learner is timed with, at most: its time grows with them in proportion."""


@dataclass(frozen=True)
class Effort:
    """How much is measured. repeats: of each figure, of which the median counts. seconds: of each repeat at least."""

    envs: tuple[int, ...]
    rows: tuple[int, ...]
    repeats: int
    seconds: float
    groups: int

    @staticmethod
    def quick() -> "Effort":
        """A few seconds beside what the parts take to start."""
        return Effort((1, 4, 8), (1, 8, 32), 3, 0.05, QUICK_GROUPS)

    @staticmethod
    def full() -> "Effort":
        """A minute or two on a CPU."""
        return Effort((1, 2, 4, 8, 16, 32, 64), (1, 4, 16, 64, 256), 5, 0.5, 0)


def measure(recipe: Recipe, effort: Effort, tell: Callable[[str], None]) -> dict[str, Any]:
    """The content of a profile, as `services.cli.planning.profile` reads it."""
    learner = recipe.learner
    torch.set_num_threads(learner.threads)
    spec, sim = _simulation(recipe, effort, tell)
    policy = build_policy(PolicyConfig.for_sim(spec, **recipe.policy), device=learner.device)
    inference = _inference(policy, spec, effort, tell)
    trained, bytes_per_step = _training(policy, spec, learner, effort, tell)
    seconds, length = _publishing(policy, effort)
    tell(f"publishing {length:,} bytes takes {1000 * seconds:.2f} ms before they travel")
    config = policy.spec.config
    return {
        "format": "dvla-profile-1",
        "recipe": recipe.name,
        "emulated": MARK in (spec.backend, config["family"]),
        "machine": _machine(learner.device),
        "chunk": policy.spec.chunk,
        "sim": sim,
        "inference": inference,
        "learner": trained,
        "publish": {"seconds": seconds, "bytes": length},
        "edges": {"trajectory_bytes_per_step": bytes_per_step, "observation_bytes_per_chunk": _observed_bytes(spec)},
        "staleness": learner.staleness_bound,
        "memory": _memory(policy, length),
    }


def _simulation(recipe: Recipe, effort: Effort, tell: Callable[[str], None]) -> tuple[SimSpec, dict[str, list[Any]]]:
    """Seconds of a control step over the number of environments, in chunks as the policy acts."""
    seconds, spec = [], None
    for envs in effort.envs:
        sim = build_sim(recipe.sim, envs)
        spec = sim.spec
        runner, slots, task = ChunkRunner(sim), np.arange(envs), spec.tasks[0].id
        states = [sim.make_start(task, seed) if spec.starts == "state" else b"" for seed in range(envs)]
        starts = [Start(task, state, seed) for seed, state in enumerate(states)]
        chunk = PolicyConfig.for_sim(spec, **recipe.policy).chunk
        actions = np.random.default_rng(0).uniform(-1, 1, (envs, chunk, spec.action.dim)).astype(np.float32)

        def turn(runner: ChunkRunner = runner, slots: Any = slots, actions: FloatArray = actions) -> None:
            idle = np.setdiff1d(slots, runner.running)
            if len(idle):  # resets belong to simulation, and come as often as episodes end
                runner.reset(idle, [starts[slot] for slot in idle], np.zeros(len(idle), np.bool_))  # noqa: B023
            runner.advance(slots, actions)

        turn()
        seconds.append(_median(turn, effort) / chunk)
        tell(f"simulation of {envs}: {1000 * seconds[-1]:.2f} ms a control step, {envs / seconds[-1]:,.0f} env steps/s")
        sim.close()
    assert spec is not None
    return spec, {"envs": list(effort.envs), "step_seconds": seconds}


def _inference(policy: Policy, spec: SimSpec, effort: Effort, tell: Callable[[str], None]) -> dict[str, list[Any]]:
    """Seconds of a policy call over its rows, from arrays to arrays."""
    actor = copy.deepcopy(policy).eval().requires_grad_(False)
    seconds = []
    for rows in effort.rows:
        observation = _observation(spec, rows)

        def call(rows: int = rows, observation: dict[str, Array] = observation) -> None:
            _act(actor, observation, spec, [f"profile/{row}" for row in range(rows)])

        call()
        seconds.append(_median(call, effort))
        tell(f"inference on {rows} rows: {1000 * seconds[-1]:.2f} ms")
    return {"rows": list(effort.rows), "call_seconds": seconds}


def _training(
    policy: Policy, spec: SimSpec, config: LearnerConfig, effort: Effort, tell: Callable[[str], None]
) -> tuple[dict[str, float], float]:
    """The learner's time for each env step, epochs and all; and bytes of a trajectory for each env step."""
    count = min(effort.groups or config.groups_per_update, config.groups_per_update)
    chunks = min(EPISODE_CHUNKS, -(-spec.tasks[0].max_steps // policy.spec.chunk))
    size = max(2, config.group_size)
    smaller = replace(config, groups_per_update=count, minibatches=min(config.minibatches, count * config.group_size))
    reference = copy.deepcopy(policy).eval().requires_grad_(False) if config.kl_weight else None
    updater = Updater(policy.train(), smaller, reference)
    groups = [_group(policy, spec, number, size, chunks) for number in range(count)]
    steps = sum(member.steps for group in groups for member in group.members)

    def update() -> None:
        batch = build_batch(groups, 0, Lineage(), config.normalisation, config.device)
        assert batch is not None
        updater.run(updater.judge(batch), 0)

    update()
    once = replace(effort, seconds=0.0, repeats=min(3, effort.repeats))
    seconds = _median(update, once) / steps
    trajectory = groups[0].members[0].trajectory or {}
    length = sum(array.nbytes for array in trajectory.values()) / groups[0].members[0].steps
    tell(f"training: {1000 * seconds:.3f} ms an env step; a trajectory has {length:,.0f} bytes an env step")
    whole = config.groups_per_update * size * spec.tasks[0].max_steps
    steps_of = {"seconds_per_step": seconds, "seconds_per_trajectory": seconds * spec.tasks[0].max_steps}
    return steps_of | {"steps_per_update": whole, "optimiser_steps": config.epochs * config.minibatches}, length


def _group(policy: Policy, spec: SimSpec, number: int, size: int, chunks: int) -> PreparedGroup:
    """A group of whole episodes, of which every other one succeeds."""
    members = []
    for index in range(size):
        trajectory = _trajectory(policy, spec, f"profile/{number}/{index}", chunks)
        good = index % 2 == 0
        steps = int(trajectory["executed"].sum())
        members.append(Member(float(good), steps, float(good), good, good, trajectory))
    return prepare_group(number, spec.tasks[0].id, members, policy)


def _trajectory(policy: Policy, spec: SimSpec, key: str, chunks: int) -> Trajectory:
    observation = {name: array for name, array in _observation(spec, chunks).items() if name in policy.spec.observation}
    act, action = _act(policy, observation, spec, [f"{key}/{index}" for index in range(chunks)])
    shape = (chunks, policy.spec.chunk)
    return {
        **{f"obs/{name}": array for name, array in observation.items()},
        **{f"record/{name}": array for name, array in numpy_record(act.record).items()},
        "action": action,
        "executed_action": action,
        "log_prob": act.log_prob.detach().float().cpu().numpy(),
        "reward": np.zeros(shape, np.float32),
        "success": np.zeros(shape, np.bool_),
        "executed": np.full(chunks, policy.spec.chunk, np.int32),
        "version": np.zeros((chunks, 2), np.int64),
        "ends": np.array([True, False]),
        "instruction": instruction_array(spec.tasks[0].instruction),
    }


def _act(policy: Policy, observation: dict[str, Array], spec: SimSpec, keys: Sequence[str]) -> tuple[Any, FloatArray]:
    device = next(policy.parameters()).device
    with torch.inference_mode():
        inputs = policy.preprocess(observation, [spec.tasks[0].instruction] * len(keys))
        act = policy.act(inputs, "train", RowNoise(keys, device))
        return act, policy.postprocess(act.actions)


def _publishing(policy: Policy, effort: Effort) -> tuple[float, int]:
    """Seconds for laying out, copying and hashing a version, and its bytes."""
    layout = layout_of(policy)
    buffer = np.zeros(layout.length, np.uint8)

    def seal() -> None:
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in policy.trainable_state().items()}
        bundle.pack(layout, {tensor.name: arrays[tensor.name] for tensor in layout.tensors}, buffer)
        bundle.seal(layout, "profile", Version(1, 1), buffer)

    return _median(seal, effort), layout.length


def _observation(spec: SimSpec, rows: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    out: dict[str, Array] = {}
    for tensor in spec.observation:
        shape = (rows, *tensor.shape)
        whole = np.issubdtype(np.dtype(tensor.dtype), np.integer)
        drawn = rng.integers(0, 255, shape) if whole else rng.normal(size=shape)
        out[tensor.name] = drawn.astype(tensor.dtype)
    return out


def _observed_bytes(spec: SimSpec) -> int:
    return sum(array.nbytes for array in _observation(spec, 1).values())


def _memory(policy: Policy, length: int) -> dict[str, float]:
    """What this process came to; a learner holds gradients and two moments beside the weights."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    if next(policy.parameters()).is_cuda:
        return {"policy_bytes": float(length), "learner_bytes": float(torch.cuda.max_memory_allocated())}
    return {"policy_bytes": peak, "learner_bytes": peak + 3.0 * length}


def _machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name(0) if device.startswith("cuda") else platform.processor() or platform.machine()
    return {
        "device": name,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def _median(work: Callable[[], None], effort: Effort) -> float:
    """Seconds of one call: the median of the repeats, each of as many calls as its time needs."""
    times = []
    for _ in range(effort.repeats):
        began, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - began < effort.seconds:
            work()
            calls += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)
