"""A store over the shared Redis, and runs in it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from services.common.redis_server import RedisServer
from services.rollout.store.machine import RolloutStore
from tests.rollout.store.harness import Clock, Harness, make_spec, new_store

OpenRun = Callable[..., Awaitable[Harness]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(redis_server: RedisServer, clock: Clock) -> AsyncIterator[RolloutStore]:
    store = new_store(redis_server.url, clock)
    yield store
    await store.close()


@pytest.fixture
def open_run(store: RolloutStore, clock: Clock) -> OpenRun:
    """Opens a run of its own for the test; keyword arguments change its spec."""

    async def open_run(**changes: Any) -> Harness:
        harness = Harness(store, clock, make_spec(**changes))
        await harness.open()
        return harness

    return open_run
