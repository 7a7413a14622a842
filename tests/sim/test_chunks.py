"""Chunks over a scripted simulator: ends, limits, masks, resets, clipping, broken slots."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidInput, NotFound, Unsupported
from services.common.spec import ActionSpec, FloatArray, IntArray, Observation
from services.sim.chunks import ChunkRunner
from services.sim.scripted import Script, ScriptedSim
from services.sim.toy import ToyFault, ToySim
from services.sim.vector import ControlStep, Start, VectorSim


def slots(*numbers: int) -> IntArray:
    return np.array(numbers, np.int64)


def begin(runner: ChunkRunner, *numbers: int, end_on_success: bool = True) -> Observation:
    starts = [Start("script", number.to_bytes(8, "little")) for number in numbers]
    return runner.reset(slots(*numbers), starts, np.full(len(numbers), end_on_success)).observation


def still(n: int, chunk: int) -> FloatArray:
    return np.zeros((n, chunk, 2), np.float32)


def run(text: str, max_steps: int = 10) -> ChunkRunner:
    return ChunkRunner(ScriptedSim([Script.parse(part) for part in text.split()], max_steps))


# --- S01: slots end one by one, nobody else's episode is touched ---------------------------------------------


def test_s01_trajectories_hold_one_episode_each_and_neighbours_are_untouched() -> None:
    runner = run("s3 s5 s7 s9", max_steps=20)
    sim = runner.sim
    frames: dict[int, list[list[int]]] = {slot: [] for slot in range(4)}
    begin(runner, 0, 1, 2, 3)
    episodes = []
    for _ in range(40):
        active = runner.running
        chunk = runner.advance(active, still(len(active), 1), final="all")
        for row, counters in zip(chunk.observed, chunk.observation["state"], strict=True):
            frames[int(active[row])].append([int(value) for value in counters])
        for slot in active[chunk.terminated | chunk.truncated]:
            episodes.append(frames.pop(int(slot)))
            frames[int(slot)] = []
            others = np.setdiff1d(np.arange(4), [slot])
            before = sim.observe(others)["state"].tobytes()
            begin(runner, int(slot))
            assert sim.observe(others)["state"].tobytes() == before
    assert len(episodes) > 20
    for rows in episodes:
        slot, episode, *_ = rows[0]
        assert all(row[:2] == [slot, episode] for row in rows), "one stored trajectory, one episode"
        assert [row[2] for row in rows] == list(range(1, 2 * slot + 4)), "step index rises by one"


# --- S02: the last observation belongs to the finished episode -----------------------------------------------


def test_s02_final_observation_is_the_finished_episodes_own() -> None:
    runner = run("-", max_steps=6)
    first = begin(runner, 0)["state"][0]
    assert first[2] == 0
    runner.advance(slots(0), still(1, 4))
    chunk = runner.advance(slots(0), still(1, 4), final="truncated")
    assert chunk.truncated[0]
    assert chunk.observed.tolist() == [0]
    assert chunk.observation["state"][0].tolist() == [0, 0, 6, 0], "episode 0 at its limit, not the next one at 0"
    following = begin(runner, 0)["state"][0]
    assert following[1:3].tolist() == [1, 0]


@pytest.mark.parametrize(("final", "seen"), [("none", []), ("truncated", [1]), ("all", [0, 1])])
def test_final_observations_only_where_asked(final: str, seen: list[int]) -> None:
    runner = run("s2 -", max_steps=4)
    begin(runner, 0, 1)
    chunk = runner.advance(slots(0, 1), still(2, 4), final=final)  # type: ignore[arg-type]
    assert chunk.observed.tolist() == seen


# --- S03: terminated and truncated are told apart, and the limit is counted per slot -------------------------


@pytest.mark.parametrize(
    ("script", "limit", "expected"),
    [("s3", 10, (True, False)), ("-", 3, (False, True)), ("s3", 3, (True, True)), ("f3", 10, (True, False))],
    ids=["success", "limit", "both", "fall"],
)
def test_s03_kinds_of_end(script: str, limit: int, expected: tuple[bool, bool]) -> None:
    runner = run(script, limit)
    begin(runner, 0)
    chunk = runner.advance(slots(0), still(1, 5))
    assert (bool(chunk.terminated[0]), bool(chunk.truncated[0])) == expected
    assert chunk.executed[0] == 3
    assert chunk.step[0] == 3


def test_s03_limit_counts_per_slot_after_partial_resets() -> None:
    runner = run("- -", max_steps=5)
    begin(runner, 0, 1)
    runner.advance(slots(0, 1), still(2, 3))
    begin(runner, 0)  # slot 0 starts over, slot 1 has 2 steps left
    chunk = runner.advance(slots(0, 1), still(2, 4))
    assert chunk.executed.tolist() == [4, 2]
    assert chunk.truncated.tolist() == [False, True]


def test_evaluation_runs_on_after_success_to_the_horizon() -> None:
    runner = run("s2", max_steps=6)
    begin(runner, 0, end_on_success=False)
    chunk = runner.advance(slots(0), still(1, 6))
    assert chunk.executed[0] == 6
    assert chunk.success[0].tolist() == [False, True, False, False, False, False]
    assert not chunk.terminated[0]
    assert chunk.truncated[0]


def test_a_fall_ends_an_evaluation_as_well() -> None:
    runner = run("f2", max_steps=6)
    begin(runner, 0, end_on_success=False)
    chunk = runner.advance(slots(0), still(1, 6))
    assert chunk.executed[0] == 2
    assert chunk.terminated[0]


# --- S09: clipping on a copy ---------------------------------------------------------------------------------


def test_s09_executed_action_is_clipped_and_the_callers_buffer_is_not() -> None:
    runner = ChunkRunner(ToySim(1, max_steps=20))
    state = runner.sim.make_start("reach", 1)
    runner.reset(slots(0), [Start("reach", state)], np.array([True]))
    raw = np.full((1, 3, 2), 2.5, np.float32)
    chunk = runner.advance(slots(0), raw)
    assert (raw == 2.5).all()
    assert (chunk.action == 1.0).all()


class Meddler(ScriptedSim):
    """Writes into the actions it is given, as some controllers do."""

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        actions[:] = 9
        return super().step(slots, actions)


def test_s09_a_simulator_that_edits_its_actions_does_not_change_the_record() -> None:
    runner = ChunkRunner(Meddler([Script()]))
    begin(runner, 0)
    chunk = runner.advance(slots(0), np.full((1, 2, 2), 0.5, np.float32))
    assert (chunk.action == 0.5).all()


def test_s09_unbounded_controllers_are_flagged_and_not_clipped() -> None:
    runner = run("-")
    endless = (-np.inf, -np.inf), (np.inf, np.inf)
    spec = runner.sim.spec
    runner.sim.spec = type(spec)(
        spec.observation, ActionSpec(2, *endless, bounded=False), spec.tasks, spec.starts, spec.backend
    )
    begin(runner, 0)
    chunk = runner.advance(slots(0), np.full((1, 1, 2), 50, np.float32))
    assert (chunk.action == 50).all()


# --- S10: one broken slot of sixteen -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nan_reward", "nan_observation"])
def test_s10_one_broken_slot_fails_alone(kind: str) -> None:
    fault = ToyFault.parse(f"7:0:3:{kind}")
    runner = ChunkRunner(ToySim(16, max_steps=20, faults=[fault]))
    every = np.arange(16)
    starts = [Start("reach", runner.sim.make_start("reach", seed)) for seed in range(16)]
    runner.reset(every, starts, np.ones(16, np.bool_))
    chunk = runner.advance(every, still(16, 5))
    assert [slot for slot, why in enumerate(chunk.failed) if why] == [7]
    assert "not finite" in chunk.failed[7]
    assert np.isfinite(chunk.reward).all()
    assert all(np.isfinite(array).all() for array in chunk.observation.values())
    assert chunk.observed.tolist() == [slot for slot in range(16) if slot != 7]
    assert chunk.executed.tolist() == [3 if slot == 7 and kind == "nan_reward" else 5 for slot in range(16)]
    with pytest.raises(InvalidInput, match=r"slots \[7\] have no running episode"):
        runner.advance(slots(7), still(1, 1))
    assert not any(runner.reset(slots(7), [starts[7]], np.array([True])).failed)
    assert runner.advance(slots(7), still(1, 5)).failed == ("",)


def test_s10_actions_that_are_not_finite_never_reach_the_simulator() -> None:
    runner = run("- -")
    begin(runner, 0, 1)
    actions = still(2, 2)
    actions[1, 0, 0] = np.nan
    with pytest.raises(InvalidInput, match=r"rows \[1\] are not finite"):
        runner.advance(slots(0, 1), actions)
    assert runner.advance(slots(0, 1), still(2, 1)).step.tolist() == [1, 1]


# --- bad input and bad simulators ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "actions", "message"),
    [
        ([0, 0], still(2, 1), "repeat"),
        ([5], still(1, 1), "out of range"),
        ([], still(0, 1), "list of integers"),
        ([0.5], still(1, 1), "list of integers"),
        ([0], np.zeros((1, 1, 2)), "float64, expected float32"),
        ([0], np.zeros((1, 1, 3), np.float32), r"expected \[1 slots, chunk 1..1024, 2\]"),
        ([0], np.zeros((1, 0, 2), np.float32), "expected"),
        ([0], np.zeros((2, 1, 2), np.float32), "expected"),
        ([1], still(1, 1), "no running episode"),
    ],
)
def test_bad_actions_are_refused_with_names(which: Sequence[float], actions: FloatArray, message: str) -> None:
    runner = run("- -")
    begin(runner, 0)
    with pytest.raises(InvalidInput, match=message):
        runner.advance(np.array(which), actions)


def test_bad_starts_are_refused() -> None:
    runner = run("-")
    yes = np.array([True])
    with pytest.raises(NotFound, match="unknown task 'nope'; this simulator offers script"):
        runner.reset(slots(0), [Start("nope", b"x")], yes)
    with pytest.raises(InvalidInput, match="has no state"):
        runner.reset(slots(0), [Start("script")], yes)
    with pytest.raises(InvalidInput, match="2 starts for 1 slots"):
        runner.reset(slots(0), [Start("script", b"x")] * 2, yes)
    with pytest.raises(InvalidInput, match="end_on_success"):
        runner.reset(slots(0), [Start("script", b"x")], np.ones(1))  # type: ignore[arg-type]


class Sloppy(ScriptedSim):
    wrong = ""

    def step(self, slots: IntArray, actions: FloatArray) -> ControlStep:
        good = super().step(slots, actions)
        reward = good.reward.astype(np.float64) if self.wrong == "reward" else good.reward
        return ControlStep(reward, good.success[:0] if self.wrong == "success" else good.success, good.terminated)  # type: ignore[arg-type]

    def observe(self, slots: IntArray) -> Observation:
        state = super().observe(slots)["state"]
        if self.wrong == "name":
            return {"states": state}
        return {"state": state[:, :2] if self.wrong == "shape" else state}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("reward", r"reward float64\[1\], expected float32\[1\]"),
        ("success", r"success bool\[0\], expected bool\[1\]"),
        ("name", r"observed \['states'\], its spec promises \['state'\]"),
        ("shape", r"state as float32\[1, 2\], expected float32\[1, 4\]"),
    ],
)
def test_a_simulator_that_breaks_its_spec_is_named(wrong: str, message: str) -> None:
    sim = Sloppy([Script()])
    runner = ChunkRunner(sim)
    begin(runner, 0)
    sim.wrong = wrong
    with pytest.raises(Unsupported, match=message):
        runner.advance(slots(0), still(1, 1))


# --- properties ----------------------------------------------------------------------------------------------

scripts = st.builds(Script, st.integers(0, 12), st.integers(0, 12))


@settings(max_examples=150, deadline=None)
@given(st.lists(scripts, min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 6), st.booleans(), st.data())
def test_chunks_equal_single_steps(
    parts: list[Script], limit: int, chunk: int, end_on_success: bool, data: st.DataObject
) -> None:
    """Any chunking, any subset of slots per call: every slot's episode is the one that its script alone defines."""
    runner = ChunkRunner(ScriptedSim(parts, limit))
    n = len(parts)
    begin(runner, *range(n), end_on_success=end_on_success)
    rewards: list[list[float]] = [[] for _ in parts]
    ends: dict[int, tuple[bool, bool]] = {}
    while len(runner.running):
        chosen = data.draw(st.permutations(list(runner.running)).map(lambda order: order[: max(1, len(order) - 1)]))
        result = runner.advance(np.array(chosen), still(len(chosen), chunk))
        for row, slot in enumerate(chosen):
            done = int(result.executed[row])
            rewards[slot] += result.reward[row, :done].tolist()
            assert not result.reward[row, done:].any()
            assert not result.success[row, done:].any()
            assert not result.action[row, done:].any()
            if result.terminated[row] or result.truncated[row]:
                ends[int(slot)] = bool(result.terminated[row]), bool(result.truncated[row])
            else:
                assert done == chunk
    for slot, script in enumerate(parts):
        stops = [at for at in ((script.success_at if end_on_success else 0), script.fall_at, limit) if at]
        length = min(stops)
        assert rewards[slot] == list(range(1, length + 1))
        terminated = length in ((script.success_at if end_on_success else 0), script.fall_at)
        assert ends[slot] == (terminated, length == limit)
    assert runner.env_steps == sum(len(row) for row in rewards)


def test_runner_reports_every_step_for_recordings() -> None:
    runner = run("s2 -")
    begin(runner, 0, 1)
    looked: list[list[int]] = []
    runner.advance(slots(0, 1), still(2, 3), after_step=lambda stepped: looked.append(stepped.tolist()))
    assert looked == [[0, 1], [0, 1], [1]]


def test_vector_sim_is_abstract() -> None:
    with pytest.raises(TypeError):
        VectorSim()  # type: ignore[abstract]
