"""The loop refills its slots at once, mixes no two jobs, and forgets none, wherever it is interrupted."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidInput, NotFound, Unavailable
from services.rollout.worker.sampler import Sampler
from tests.rollout.worker.fakes import SPEC, Script, ScriptedDesk, ScriptedSession, make_chunk, make_job, make_outcome

scripts = st.lists(
    st.builds(Script, st.integers(1, 4), st.sampled_from(["limit", "success", "success", "failure"])), max_size=10
)


@dataclass
class Stage:
    """A sampler with its scripted surroundings."""

    session: ScriptedSession
    desk: ScriptedDesk
    sampler: Sampler


def stage(scripts: list[Script], slots: int = 2, seed: int = 0, final_observation: bool = False) -> Stage:
    rng, draining = random.Random(seed), asyncio.Event()
    session = ScriptedSession(slots, dict(enumerate(scripts)), rng)
    desk = ScriptedDesk([make_job(number) for number in range(len(scripts))], rng, draining)
    return Stage(session, desk, Sampler(session, SPEC, desk, draining, final_observation))


@given(scripts=scripts, slots=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_every_job_ends_once_and_as_its_script_says(scripts: list[Script], slots: int, seed: int) -> None:
    async def main() -> None:
        s = stage(scripts, slots, seed)
        await asyncio.wait_for(s.sampler.run(), 30)
        assert s.desk.granted == list(range(len(scripts)))
        failing = {number for number, script in enumerate(scripts) if script.end == "failure"}
        assert Counter(s.desk.failed) == Counter(failing)
        assert Counter(s.desk.delivered) == Counter(set(range(len(scripts))) - failing)
        assert not s.sampler.episodes
        assert not s.sampler.jobs

    asyncio.run(main())


def assert_every_job_ended_once(s: Stage) -> None:
    assert Counter(s.desk.delivered + s.desk.failed) == Counter(s.desk.granted)
    assert not s.sampler.episodes
    assert not s.sampler.jobs


async def interrupt(s: Stage, ticks: int) -> bool:
    """Cancel the loop after so many turns of the event loop, then abandon; False if it had ended by itself."""
    running = asyncio.create_task(s.sampler.run())
    for _ in range(ticks):
        await asyncio.sleep(0)
    cancelled = running.cancel()
    await asyncio.wait([running])
    await s.sampler.abandon("interrupted")
    return cancelled


@given(scripts=scripts, slots=st.integers(1, 3), seed=st.integers(0, 10**6))
@settings(max_examples=6)
def test_no_job_is_forgotten_at_whatever_await_the_loop_is_cancelled(
    scripts: list[Script], slots: int, seed: int
) -> None:
    async def main() -> None:
        ticks = 0
        while True:
            s = stage(scripts, slots, seed)
            cancelled = await interrupt(s, ticks)
            assert_every_job_ended_once(s)
            if not cancelled:
                break
            ticks += 1

    asyncio.run(main())


ERRORS = (NotFound("no start"), Unavailable("gone"), ZeroDivisionError("bug"))


@given(
    scripts=scripts,
    slots=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    session_fails=st.integers(-1, 8),
    act_fails=st.integers(-1, 8),
    begin_errors=st.dictionaries(st.integers(0, 9), st.sampled_from(ERRORS), max_size=2),
)
def test_no_job_is_forgotten_whatever_fails(
    scripts: list[Script],
    slots: int,
    seed: int,
    session_fails: int,
    act_fails: int,
    begin_errors: dict[int, Exception],
) -> None:
    async def main() -> None:
        s = stage(scripts, slots, seed)
        s.session.fail_at, s.desk.act_fails_at, s.desk.begin_errors = session_fails, act_fails, begin_errors
        with suppress(Unavailable, ZeroDivisionError):
            await asyncio.wait_for(s.sampler.run(), 30)
        await s.sampler.abandon("failed")
        assert_every_job_ended_once(s)

    asyncio.run(main())


async def test_a_free_slot_takes_the_next_job_in_the_very_next_turn() -> None:
    s = stage([Script(chunks) for chunks in (1, 4, 1, 2, 1, 1, 3, 1)], slots=2)
    s.desk.rng = _Greedy()
    await s.sampler.run()
    # 8 resets and 14 chunks in two slots: 11 turns if nobody ever waits for the other's episode to end.
    assert len(s.session.turns) == 11
    assert all(sorted(resets + slots) == [0, 1] for resets, slots in s.session.turns)
    assert s.desk.asked[0] == (2, False)


class _Greedy(random.Random):
    """Grants as many jobs as asked for, and never gives way."""

    def randint(self, a: int, b: int) -> int:
        return 0 if (a, b) == (0, 3) else b


async def test_jobs_that_cannot_begin_are_void_and_the_others_go_on() -> None:
    s = stage([Script(2) for _ in range(4)])
    s.desk.begin_errors = {1: NotFound("group 1 is not live")}
    s.desk.jobs[2].task = "juggle"  # this simulator does not know it
    await s.sampler.run()
    assert sorted(s.desk.failed) == [1, 2]
    assert sorted(s.desk.delivered) == [0, 3]


async def test_a_simulator_that_is_gone_ends_the_session_instead_of_failing_the_whole_run() -> None:
    s = stage([Script(2) for _ in range(50)], slots=2)
    s.desk.begin_errors = {number: Unavailable("connection refused") for number in range(50)}
    with pytest.raises(Unavailable, match="connection refused"):
        await s.sampler.run()
    assert not s.desk.failed
    assert len(s.desk.granted) <= 2
    await s.sampler.abandon("gone")
    assert sorted(s.desk.failed) == sorted(s.desk.granted)


async def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    s = stage([Script(3) for _ in range(9)])
    running = asyncio.create_task(s.sampler.run())
    while len(s.session.turns) < 2:
        await asyncio.sleep(0)
    s.sampler.draining.set()
    granted = list(s.desk.granted)
    await asyncio.wait_for(running, 30)
    assert len(s.desk.granted) <= len(granted) + 2  # a call that was under way
    assert sorted(s.desk.delivered) == sorted(s.desk.granted)


async def test_a_draining_loop_without_episodes_ends_at_once() -> None:
    s = stage([Script()])
    s.sampler.draining.set()
    await s.sampler.run()
    assert not s.desk.asked


@pytest.mark.parametrize("asked_for", [True, False])
async def test_the_final_observation_is_kept_at_truncation_where_the_run_asks_for_it(asked_for: bool) -> None:
    s = stage([Script(2, "limit"), Script(2, "success")], final_observation=asked_for)
    await s.sampler.run()
    kept = s.desk.final_observations
    assert kept[1] is None
    if asked_for:
        np.testing.assert_array_equal(kept[0], [[0, 2]])
    else:
        assert kept[0] is None


async def test_one_failing_report_does_not_keep_the_others_from_being_made() -> None:
    s = stage([Script(9) for _ in range(3)], slots=3)
    running = asyncio.create_task(s.sampler.run())
    while len(s.sampler.episodes) < 3:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    report = s.desk.fail

    async def fail(job: object, reason: str, outside: bool = False) -> None:
        if job is s.sampler.episodes[1].job:
            raise InvalidInput("no such job")
        await report(job, reason)  # type: ignore[arg-type]

    s.desk.fail = fail  # type: ignore[method-assign]
    with pytest.raises(InvalidInput, match="no such job"):
        await s.sampler.abandon("over")
    assert len(s.desk.failed) == 2


async def test_a_missing_observation_of_an_episode_that_goes_on_is_refused() -> None:
    s = stage([Script(3)])
    s.session._step = lambda slot, action: make_outcome(state=None)  # type: ignore[method-assign]
    with pytest.raises(InvalidInput, match="sent no observation for slot 0"):
        await s.sampler.run()
    assert make_chunk(1).version == (1, 1)
