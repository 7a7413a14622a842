"""Control steps a second of ManiSkill on one CPU core: its own loop against ours, by process CPU time.

    python benchmarks/simulator.py --task PushCube-v1 --control-mode pd_ee_delta_pos --steps 1000

CPU time, not wall time, so that a busy machine distorts less; run it on a quiet one for numbers to publish.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from services.sim.chunks import ChunkRunner
from services.sim.maniskill_common import ManiSkillOptions, make_env, single_thread
from services.sim.maniskill_cpu import ManiSkillCpu
from services.sim.vector import Start

SLOTS, CHUNK = 4, 5


def own_loop(options: ManiSkillOptions, steps: int) -> Callable[[], int]:
    """gymnasium's way: one environment, `env.step` with an observation at every step."""
    env = make_env(options.tasks[0], options, 1, "physx_cpu")
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (steps, *env.single_action_space.shape)).astype(np.float32)

    def run() -> int:
        for index, action in enumerate(actions):
            if index % 50 == 0:
                env.reset(seed=index)
            env.step(action)
        return steps

    return run


def chunked(options: ManiSkillOptions, steps: int) -> Callable[[], int]:
    """Ours: several slots in one process, chunks, an observation at the end of each."""
    sim = ManiSkillCpu(SLOTS, options)
    runner, slots = ChunkRunner(sim), np.arange(SLOTS)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (SLOTS, CHUNK, sim.spec.action.dim)).astype(np.float32)
    starts = [Start(options.tasks[0], sim.make_start(options.tasks[0], seed)) for seed in range(SLOTS)]

    def run() -> int:
        before = runner.env_steps
        while runner.env_steps - before < steps:
            idle = np.setdiff1d(slots, runner.running)
            if len(idle):
                runner.reset(idle, [starts[slot] for slot in idle], np.zeros(len(idle), np.bool_))
            runner.advance(slots, actions)
        return runner.env_steps - before

    return run


def rate(run: Callable[[], int]) -> float:
    """Steps per second of CPU time, after a warm-up."""
    run()
    start = time.process_time()
    steps = run()
    return steps / (time.process_time() - start)


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="PushCube-v1")
    parser.add_argument("--control-mode", default="pd_ee_delta_pos")
    parser.add_argument("--observation", default="state")
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    single_thread()

    def options(lean: bool) -> ManiSkillOptions:
        return ManiSkillOptions((given.task,), given.observation, control_mode=given.control_mode, lean_control=lean)

    results = {
        "maniskill env.step": rate(own_loop(options(False), given.steps)),
        "chunks, maniskill's controller": rate(chunked(options(False), given.steps)),
        "chunks, lean controller": rate(chunked(options(True), given.steps)),
    }
    print(json.dumps(vars(given) | {name: round(value, 1) for name, value in results.items()}, indent=2))


if __name__ == "__main__":
    main()
