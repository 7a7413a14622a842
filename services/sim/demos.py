"""Demonstrations by scripted experts: runs episodes in several processes and writes shards of whole episodes.

A shard is a safetensors file with `obs/<name>` [N, ...], `action` float32 [N, D] (environment units, the expert's
clean labels, within the limits), `episode` int64 [N] and `step` int64 [N]; its header says, as JSON under the key
`demos`, what made it and how each episode ended. An episode ends with success or at the step limit. Failures are
kept unless asked otherwise: leaving them out would take a biased expert's bias out of the data.

Episode i starts from `demonstration_seed(seed, i)` and draws its noise from (seed, i): the same data, whatever the
number of processes.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from services.common.errors import ConfigError, Unavailable, Unsupported
from services.common.process import die_with_parent
from services.common.seeds import demonstration_seed
from services.common.spec import Array, FloatArray, IntArray, SimSpec
from services.sim.config import SimConfig, build_sim
from services.sim.experts import Expert, with_noise
from services.sim.vector import Start, VectorSim

HEADER = "demos"
SHARD_EPISODES = 10

Progress = Callable[[int, int], None]
"""Called with (episodes done, episodes in all)."""


@dataclass(frozen=True)
class DemoPlan:
    """What to record. bias: 0 is the competent expert, 1 the deliberately wrong one. noise: see `with_noise`."""

    task: str
    episodes: int
    seed: int = 0
    bias: float = 0.0
    noise: float = 0.1
    keep_failures: bool = True

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise ConfigError(f"episodes = {self.episodes}; expected 1 or more demonstrations")
        if self.noise < 0:
            raise ConfigError(f"noise = {self.noise}; expected 0 or more")


@dataclass(frozen=True)
class Episode:
    """One demonstrated episode. steps: control steps. kept: it is in the shard."""

    episode: int
    seed: int
    success: bool
    steps: int
    kept: bool


def generate(
    config: SimConfig, plan: DemoPlan, folder: Path, processes: int = 1, progress: Progress = lambda done, total: None
) -> list[Episode]:
    """Record `plan.episodes` demonstrations into the folder; returns how each episode went.

    processes: spawned processes that share the work; 0 works in this one. Raises Unsupported without an expert.
    """
    folder.mkdir(parents=True, exist_ok=True)
    batches = [
        range(first, min(first + SHARD_EPISODES, plan.episodes)) for first in range(0, plan.episodes, SHARD_EPISODES)
    ]
    episodes: list[Episode] = []
    for batch in _run(config, plan, folder, batches, min(processes, len(batches))):
        episodes += batch
        progress(len(episodes), plan.episodes)
    episodes.sort(key=lambda episode: episode.episode)
    return episodes


def _run(
    config: SimConfig, plan: DemoPlan, folder: Path, batches: Sequence[range], processes: int
) -> Iterable[list[Episode]]:
    if not processes:
        yield from (record(config, plan, folder, batch) for batch in batches)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=die_with_parent, initargs=(os.getpid(),)) as pool:
        waiting = [pool.submit(record, config, plan, folder, batch) for batch in batches]
        try:
            for future in as_completed(waiting):
                yield future.result()
        except BrokenProcessPool as error:
            raise Unavailable("a demonstration process died; run the command again with fewer processes") from error
        finally:
            pool.shutdown(cancel_futures=True)


def record(config: SimConfig, plan: DemoPlan, folder: Path, batch: range) -> list[Episode]:
    """Record one shard: these episodes of a plan."""
    sim = _simulator(_Key(config))
    expert = Expert(plan.task, sim.spec.action, plan.bias)
    episodes, rows = [], []
    for index in batch:
        episode, data = _demonstrate(sim, expert, plan, index)
        episodes.append(episode)
        if episode.kept:
            rows.append(data)
    if rows:
        arrays = {name: np.concatenate([data[name] for data in rows]) for name in rows[0]}
        path = folder / f"{plan.task}-{batch[0] // SHARD_EPISODES:05d}.safetensors"
        _write(path, arrays, _describe(sim.spec, plan, episodes))
    return episodes


class _Key:
    """A configuration as a key of a cache: equal by content."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self._text = json.dumps(asdict(config), sort_keys=True)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text


@lru_cache(maxsize=1)
def _simulator(key: _Key) -> VectorSim:
    """One slot, built once per process."""
    return build_sim(key.config, num_slots=1)


def _demonstrate(sim: VectorSim, expert: Expert, plan: DemoPlan, index: int) -> tuple[Episode, dict[str, Array]]:
    """One episode: what was seen before each step and what the expert would have done there."""
    slot = np.zeros(1, np.int64)
    seed = demonstration_seed(plan.seed, index)
    rng = np.random.default_rng((plan.seed, index))
    state = sim.make_start(plan.task, seed) if sim.spec.starts == "state" else b""
    sim.reset(slot, [Start(plan.task, state, seed)])
    low, high = np.array(sim.spec.action.low, np.float32), np.array(sim.spec.action.high, np.float32)
    seen: list[dict[str, Array]] = []
    labels: list[FloatArray] = []
    success = False
    while not success and len(labels) < sim.spec.task(plan.task).max_steps:
        seen.append(sim.observe(slot))
        labels.append(expert(_privileged(sim, slot)))
        result = sim.step(slot, np.clip(with_noise(labels[-1], plan.noise, rng), low, high))
        success = bool(result.success[0])
        if result.terminated[0]:
            break
    steps = len(labels)
    data: dict[str, Array] = {f"obs/{name}": np.concatenate([row[name] for row in seen]) for name in seen[0]}
    data["action"] = np.concatenate(labels)
    data["episode"] = np.full(steps, index, np.int64)
    data["step"] = np.arange(steps, dtype=np.int64)
    return Episode(index, seed, success, steps, success or plan.keep_failures), data


def _privileged(sim: VectorSim, slots: IntArray) -> FloatArray:
    """The state that experts read."""
    privileged = getattr(sim, "privileged_state", None)
    if privileged is None:
        raise Unsupported(f"{sim.spec.backend} has no privileged_state(slots), which a scripted expert needs")
    state: FloatArray = privileged(slots)
    return state


def _describe(spec: SimSpec, plan: DemoPlan, episodes: Sequence[Episode]) -> dict[str, Any]:
    task = spec.task(plan.task)
    return {
        "instruction": task.instruction,
        "max_steps": task.max_steps,
        "backend": spec.backend,
        "action": asdict(spec.action),
        "expert": "scripted",
        **{name: value for name, value in asdict(plan).items() if name != "episodes"},
        "episodes": [asdict(episode) for episode in episodes],
    }


def _write(path: Path, arrays: dict[str, Array], details: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, partial, {HEADER: json.dumps(details)})
    os.replace(partial, path)
