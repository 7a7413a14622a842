"""Each group's start state is made once, and the store's word counts."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.common.errors import Unavailable
from services.rollout.worker.starts import KEEP, Starts
from tests.rollout.worker.fakes import make_job


class Store:
    """Keeps the first start state of each group."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}
        self.calls = 0

    async def set_start(self, group: int, start: bytes) -> bytes:
        self.calls += 1
        await asyncio.sleep(0)
        return self.kept.setdefault(group, start)


def maker(made: list[tuple[str, int]], name: str = "a") -> Callable[[str, int], Awaitable[bytes]]:
    async def make(task: str, seed: int) -> bytes:
        await asyncio.sleep(0)
        made.append((task, seed))
        return f"{name}/{task}/{seed}".encode()

    return make


async def test_members_of_a_group_that_begin_together_share_one_start() -> None:
    store, made = Store(), list[tuple[str, int]]()
    starts = Starts(store.set_start)
    jobs = [make_job(number) for number in (1, 1, 2, 1)]
    got = await asyncio.gather(*(starts.of(job, maker(made, str(n))) for n, job in enumerate(jobs)))
    assert got == [b"0/reach/1001", b"0/reach/1001", b"2/reach/1002", b"0/reach/1001"]
    assert made == [("reach", 1001), ("reach", 1002)]
    assert store.calls == 2
    assert await starts.of(make_job(1), maker(made)) == got[0]
    assert store.calls == 2


async def test_the_start_that_another_worker_stored_first_counts() -> None:
    store = Store()
    store.kept[1] = b"theirs"
    assert await Starts(store.set_start).of(make_job(1), maker([])) == b"theirs"


async def test_a_start_that_came_with_the_job_is_used_as_it_is() -> None:
    store, made = Store(), list[tuple[str, int]]()
    assert await Starts(store.set_start).of(make_job(1, start=b"given"), maker(made)) == b"given"
    assert not made
    assert not store.calls


async def test_starts_of_evaluations_are_made_and_not_stored() -> None:
    store, made = Store(), list[tuple[str, int]]()
    starts = Starts(store.set_start)
    for _ in range(2):
        assert await starts.of(make_job(1, evaluate=True), maker(made)) == b"a/reach/1001"
    assert len(made) == 2
    assert not store.calls


async def test_if_one_simulator_fails_the_next_member_makes_the_start_with_its_own() -> None:
    store, made = Store(), list[tuple[str, int]]()
    starts = Starts(store.set_start)

    async def broken(task: str, seed: int) -> bytes:
        await asyncio.sleep(0)
        raise Unavailable("gone")

    first, second = await asyncio.gather(
        starts.of(make_job(1), broken), starts.of(make_job(1), maker(made, "b")), return_exceptions=True
    )
    assert isinstance(first, Unavailable)
    assert second == b"b/reach/1001"
    assert made == [("reach", 1001)]


async def test_a_cancelled_member_leaves_the_start_to_the_others() -> None:
    store, made = Store(), list[tuple[str, int]]()
    starts = Starts(store.set_start)

    async def hanging(task: str, seed: int) -> bytes:
        await asyncio.sleep(3600)
        return b""

    first = asyncio.create_task(starts.of(make_job(1), hanging))
    second = asyncio.create_task(starts.of(make_job(1), maker(made, "b")))
    await asyncio.sleep(0.01)
    first.cancel()
    assert await asyncio.wait_for(second, 10) == b"b/reach/1001"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_only_the_newest_groups_are_remembered() -> None:
    store, made = Store(), list[tuple[str, int]]()
    starts = Starts(store.set_start)
    for number in range(KEEP + 1):
        await starts.of(make_job(number), maker(made))
    assert len(starts._groups) == KEEP
    assert await starts.of(make_job(0), maker(made, "again")) == b"a/reach/1000"  # the store still knows
