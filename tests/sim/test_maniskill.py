"""ManiSkill for real, on the CPU: start states, exact replay, no observation inside chunks, experts, lean control."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from services.common.errors import ConfigError, InvalidInput
from services.common.seeds import demonstration_seed, training_seed
from services.common.spec import FloatArray, IntArray
from services.sim.vector import Start

pytestmark = [pytest.mark.maniskill, pytest.mark.timeout(600)]

PUSH, PICK = "PushCube-v1", "PickCube-v1"
ZERO = np.zeros(1, np.int64)


def make(slots: int, **options: Any) -> Any:
    from services.sim.maniskill_common import ManiSkillOptions
    from services.sim.maniskill_cpu import ManiSkillCpu

    return ManiSkillCpu(slots, ManiSkillOptions(**options))


@pytest.fixture(scope="module")
def sim() -> Iterator[Any]:
    sim = make(3, tasks=(PUSH, PICK), reward="normalized_dense")
    yield sim
    sim.close()


def digest(sim: Any, slot: int) -> str:
    from services.sim.maniskill_common import encode_state

    inside = sim._at(slot)
    return hashlib.sha256(encode_state(inside.task, inside.env)).hexdigest()


def load(sim: Any, task: str, state: bytes, *slots: int) -> IntArray:
    chosen = np.array(slots, np.int64)
    sim.reset(chosen, [Start(task, state)] * len(slots))
    return chosen


def load_state(sim: Any, task: str, state: bytes) -> FloatArray:
    seen: FloatArray = sim.privileged_state(load(sim, task, state, 0))
    return seen


def expert_actions(sim: Any, task: str, state: bytes, steps: int) -> FloatArray:
    """What the expert does from a start: contact, grasp, transport."""
    from services.sim.experts import Expert

    expert = Expert(task, sim.spec.action)
    load(sim, task, state, 0)
    actions = []
    for _ in range(steps):
        actions.append(expert(sim.privileged_state(ZERO)))
        sim.step(ZERO, actions[-1])
    return np.concatenate(actions)


def test_spec(sim: Any) -> None:
    spec = sim.spec
    assert [(task.id, task.max_steps) for task in spec.tasks] == [(PUSH, 50), (PICK, 50)]
    assert spec.task(PICK).instruction == "pick up the red cube and move it to the green goal"
    assert (spec.starts, spec.backend, spec.batched) == ("state", "maniskill/physx_cpu", False)
    assert (spec.action.dim, spec.action.control_mode, spec.action.bounded) == (4, "pd_ee_delta_pos", True)
    (state,) = spec.observation
    assert state.shape == (42,), "PushCube's 35 numbers are padded to PickCube's 42"


def test_one_seed_gives_one_state_in_every_slot_and_every_subset(sim: Any) -> None:
    for task in (PUSH, PICK):
        state = sim.make_start(task, 7)
        hashes = set()
        for subset in ((0,), (1,), (2, 0), (0, 1, 2)):
            load(sim, task, sim.make_start(task, 8), 0, 1, 2)
            assert sim.make_start(task, 7) == state, "making a start depends on task and seed only"
            load(sim, task, state, *subset)
            hashes |= {digest(sim, slot) for slot in subset}
        assert len(hashes) == 1


def test_s05_seeds_give_distinct_starts(sim: Any) -> None:
    starts = {sim.make_start(PUSH, training_seed(0, index)) for index in range(100)}
    assert len(starts) >= 95
    assert sim.make_start(PUSH, 2**32 - 1) not in starts


def test_resets_leave_neighbours_alone(sim: Any) -> None:
    load(sim, PUSH, sim.make_start(PUSH, 1), 0, 1, 2)
    sim.step(np.arange(3), np.full((3, 4), 0.3, np.float32))
    before = [digest(sim, slot) for slot in (0, 2)]
    load(sim, PUSH, sim.make_start(PUSH, 2), 1)
    sim.step(np.array([1]), np.full((1, 4), 0.3, np.float32))
    assert [digest(sim, slot) for slot in (0, 2)] == before


def traces(sim: Any, task: str, state: bytes, actions: FloatArray, plan: list[tuple[int, int]]) -> list[list[str]]:
    """Replays from one start in several slots, each after so many random steps of another episode."""
    rng = np.random.default_rng(0)
    out = []
    for slot, disturb in plan:
        one = np.array([slot])
        load(sim, task, sim.make_start(task, slot), slot)
        for _ in range(disturb):
            sim.step(one, rng.uniform(-1, 1, (1, 4)).astype(np.float32))
        load(sim, task, state, slot)
        trace = [digest(sim, slot)]
        for action in actions:
            step = sim.step(one, action[None])
            trace.append(f"{digest(sim, slot)} {step.reward[0]} {step.success[0]}")
        out.append(trace)
    return out


@pytest.mark.parametrize("task", [PUSH, PICK])
def test_equal_actions_from_one_start_give_equal_episodes(sim: Any, task: str) -> None:
    actions = np.random.default_rng(5).uniform(-1, 1, (20, 4)).astype(np.float32)
    actions[:, 2] = np.abs(actions[:, 2])  # away from the table
    got = traces(sim, task, sim.make_start(task, 3), actions, [(0, 0), (1, 0), (1, 15), (2, 3), (0, 7)])
    assert all(trace == got[0] for trace in got)
    assert len(set(got[0])) == len(actions) + 1


def test_exact_replay_holds_through_contacts_whatever_happened_before() -> None:
    sim = make(2, exact_replay=True)
    for index in (3, 5):  # without exact_replay these diverge from the first contact on
        state = sim.make_start(PUSH, demonstration_seed(0, index))
        actions = expert_actions(sim, PUSH, state, 16)
        pushed = sim.privileged_state(ZERO)[0, 28] - load_state(sim, PUSH, state)[0, 28]
        assert pushed > 0.02, "the cube was touched and moved along x"
        got = traces(sim, PUSH, state, actions, [(0, 0), (0, 12), (1, 0), (0, 0)])
        assert all(trace == got[0] for trace in got)
    sim.close()


@pytest.mark.parametrize("mode", ["pd_ee_delta_pos", "pd_ee_delta_pose"])
def test_lean_control_moves_as_maniskills_own(mode: str) -> None:
    rng = np.random.default_rng(1)
    sims = [make(1, tasks=(PICK,), control_mode=mode, lean_control=lean) for lean in (False, True)]
    assert sims[0]._at(0)._lean is None
    assert sims[1]._at(0)._lean is not None
    state = sims[0].make_start(PICK, 4)
    actions = rng.uniform(-1, 1, (40, sims[0].spec.action.dim)).astype(np.float32)
    for sim in sims:
        load(sim, PICK, state, 0)
    for action in actions:
        for sim in sims:
            sim.step(ZERO, action[None])
        one, other = (sim.privileged_state(ZERO) for sim in sims)
        assert np.allclose(one, other, atol=2e-4)
    for sim in sims:
        sim.close()


def test_uncovered_controllers_keep_maniskills_code() -> None:
    sim = make(1, control_mode="pd_joint_delta_pos")
    assert sim._at(0)._lean is None
    assert sim.spec.action.dim == 8
    load(sim, PUSH, sim.make_start(PUSH, 0), 0)
    assert np.isfinite(sim.step(ZERO, np.full((1, 8), 0.5, np.float32)).reward).all()
    sim.close()


def test_observations_are_computed_at_chunk_ends_only(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.sim.chunks import ChunkRunner

    runner = ChunkRunner(sim)
    start = Start(PUSH, sim.make_start(PUSH, 0))
    runner.reset(np.arange(2), [start, start], np.ones(2, np.bool_))
    env = type(sim._at(0).env)
    calls = []
    inside = env._get_obs_extra

    def counted(self: Any, info: Any) -> Any:
        calls.append(1)
        return inside(self, info)

    monkeypatch.setattr(env, "_get_obs_extra", counted)
    chunk = runner.advance(np.arange(2), np.zeros((2, 5, 4), np.float32))
    assert chunk.executed.tolist() == [5, 5]
    assert len(calls) == 2, "one observation per slot for five control steps"
    assert (chunk.reward > 0).all()
    runner.reset(np.arange(2), [start, start], np.ones(2, np.bool_))
    assert len(calls) == 4


@pytest.mark.parametrize(("task", "bias", "low", "high"), [(PUSH, 0.0, 1, 1), (PUSH, 1.0, 0.1, 0.9), (PICK, 0.0, 1, 1)])
def test_experts(sim: Any, task: str, bias: float, low: float, high: float) -> None:
    from services.sim.experts import Expert

    expert = Expert(task, sim.spec.action, bias)
    wins = []
    for index in range(10 if bias else 4):
        load(sim, task, sim.make_start(task, demonstration_seed(1, index)), 0)
        wins.append(any(sim.step(ZERO, expert(sim.privileged_state(ZERO))).success[0] for _ in range(50)))
    assert low <= np.mean(wins) <= high


def test_start_states_of_another_task_or_broken_ones_are_refused(sim: Any) -> None:
    with pytest.raises(InvalidInput, match=r"does not fit task 'PickCube-v1'"):
        load(sim, PICK, sim.make_start(PUSH, 0), 0)
    with pytest.raises(InvalidInput, match="is not a ManiSkill start state"):
        load(sim, PUSH, b"\x00" * 64, 0)
    import safetensors.numpy

    arrays = safetensors.numpy.load(sim.make_start(PUSH, 0))
    arrays["actors/cube"][0] = np.nan
    with pytest.raises(InvalidInput, match="is not finite"):
        load(sim, PUSH, safetensors.numpy.save(arrays), 0)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tasks": ("Nope-v1",)}, ConfigError, "unknown ManiSkill task 'Nope-v1'"),
        ({"control_mode": "telepathy"}, ConfigError, "control_mode = 'telepathy' is impossible"),
        ({"reward": "praise"}, ConfigError, "expected sparse, dense, normalized_dense"),
        ({"observation": "smell"}, ConfigError, "expected state, rgb"),
        ({"observation": "rgb", "render": "none"}, ConfigError, "needs a renderer"),
        ({"tasks": (PUSH, PUSH)}, ConfigError, "different task ids"),
        ({"instructions": ("a", "b")}, ConfigError, "give one per task"),
    ],
)
def test_impossible_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        make(1, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.slow  # the software renderer compiles its shaders for some ten seconds
def test_images_and_proprioception_without_object_poses() -> None:
    sim = make(1, observation="rgb+proprio", image_size=32)
    assert {tensor.name: tensor.shape for tensor in sim.spec.observation} == {
        "rgb/base_camera": (32, 32, 3),
        "state": (25,),
    }
    load(sim, PUSH, sim.make_start(PUSH, 3), 0)
    seen = sim.observe(ZERO)
    assert seen["rgb/base_camera"].dtype == np.uint8
    assert seen["rgb/base_camera"].std() > 5, "there is something in the picture"
    assert sim.privileged_state(ZERO).shape == (1, 35)
    assert sim.render(0).shape == (256, 256, 3)
    sim.close()


def test_s36_no_vulkan_device_is_one_actionable_line_and_exit_code_2() -> None:
    nowhere = {"VK_ICD_FILENAMES": "/nonexistent", "VK_DRIVER_FILES": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-m", "services.sim", "--listen", f"unix:/tmp/dvla-novulkan-{os.getpid()}.sock"],
        env={**os.environ, **nowhere, "PYTHONPATH": ".:protos/gen"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "no Vulkan device" in errors[0]
    assert "install mesa-vulkan-drivers" in errors[0]
    assert "Traceback" not in done.stderr
