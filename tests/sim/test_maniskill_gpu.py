"""ManiSkill's batched backend on a GPU: start states, isolation of slots, exact holding. Needs an NVIDIA GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from services.common.errors import ConfigError
from services.common.spec import IntArray
from services.sim.chunks import ChunkRunner
from services.sim.vector import Start

PUSH = "PushCube-v1"


def make(slots: int, **options: Any) -> Any:
    from services.sim.maniskill_common import ManiSkillOptions
    from services.sim.maniskill_gpu import ManiSkillGpu

    return ManiSkillGpu(slots, ManiSkillOptions(**options))


@pytest.fixture(scope="module")
def sim() -> Iterator[Any]:
    sim = make(8, reward="normalized_dense")
    yield sim
    sim.close()


def load(sim: Any, seed: int, slots: IntArray) -> None:
    state = sim.make_start(PUSH, seed)
    sim.reset(slots, [Start(PUSH, state)] * len(slots))


@pytest.mark.gpu
@pytest.mark.maniskill
def test_one_seed_gives_one_start_in_every_slot_and_subset(sim: Any) -> None:
    assert sim.make_start(PUSH, 7) == sim.make_start(PUSH, 7)
    assert len({sim.make_start(PUSH, seed) for seed in range(50)}) >= 48
    seen = []
    for subset in ([0], [5, 2], list(range(8))):
        slots = np.array(subset)
        load(sim, 8, np.arange(8))
        load(sim, 7, slots)
        seen.append(sim.privileged_state(slots))
    rows = np.concatenate(seen)
    assert np.abs(rows - rows[0]).max() < 1e-4


@pytest.mark.gpu
@pytest.mark.maniskill
@pytest.mark.parametrize("mode", ["pd_ee_delta_pos", "pd_joint_target_delta_pos"])
def test_slots_left_out_hold_still(mode: str) -> None:
    sim = make(4, control_mode=mode)
    load(sim, 1, np.arange(4))
    actions = np.full((2, sim.spec.action.dim), 0.5, np.float32)
    before = sim.privileged_state(np.array([1, 3]))
    for _ in range(10):
        sim.step(np.array([0, 2]), actions)
    assert np.abs(sim.privileged_state(np.array([1, 3])) - before).max() < 1e-3
    moved = sim.privileged_state(np.array([0, 2]))
    load(sim, 1, np.array([1]))
    sim.make_start(PUSH, 9)
    assert np.abs(sim.privileged_state(np.array([0, 2])) - moved).max() < 1e-3
    sim.close()


@pytest.mark.gpu
@pytest.mark.maniskill
def test_chunks_with_ends_at_different_steps(sim: Any) -> None:
    runner = ChunkRunner(sim)
    slots = np.arange(8)
    start = Start(PUSH, sim.make_start(PUSH, 3))
    runner.reset(slots, [start] * 8, np.ones(8, np.bool_))
    runner.advance(slots[:4], np.zeros((4, 7, 4), np.float32))
    chunk = runner.advance(slots, np.zeros((8, 46, 4), np.float32))
    assert chunk.executed.tolist() == [43] * 4 + [46] * 4
    assert chunk.truncated.tolist() == [True] * 4 + [False] * 4


@pytest.mark.maniskill
def test_impossible_options_are_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="start one per task"):
        make(2, tasks=(PUSH, "PickCube-v1"))
    with pytest.raises(ConfigError, match="exact_replay"):
        make(2, exact_replay=True)


@pytest.mark.maniskill
def test_no_cuda_is_one_clear_line() -> None:
    import torch

    from services.common.errors import Unsupported

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Unsupported, match="no CUDA device"):
        make(2)
