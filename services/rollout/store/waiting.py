"""Long polls without busy waiting: scripts publish what changed, and one subscriber wakes whoever waits for it.

A wake-up can get lost with its connection, and an expired grant publishes nothing, so waiters also look by
themselves once a second.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from redis import exceptions

from services.common.errors import DvlaError
from services.rollout.store.keys import WAKE_PATTERN, run_of_channel
from services.rollout.store.redis_client import COMMAND_SECONDS, RedisLink

log = structlog.get_logger()
T = TypeVar("T")

LOOK_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
_PING_SECONDS = 10.0


class Wakeups:
    """Wakes waiters of (run, what), where what is "jobs", "groups" or "evals"."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._events: dict[tuple[str, str], asyncio.Event] = {}
        self._closing = asyncio.Event()

    def ticket(self, run: str, what: str) -> asyncio.Event:
        """An event that is set at the next change from now on. Take it before looking, so that none is missed."""
        return self._events.setdefault((run, what), asyncio.Event())

    def notify(self, run: str, what: str) -> None:
        """Wake everybody who waits for this."""
        event = self._events.pop((run, what), None)
        if event:
            event.set()

    def close(self) -> None:
        """Let every waiter answer at once with what there is."""
        self._closing.set()
        for event in self._events.values():
            event.set()

    async def poll(self, run: str, what: str, seconds: float, look: Callable[[], Awaitable[tuple[bool, T]]]) -> T:
        """Call `look` until it says True or the time is over; returns its last value."""
        deadline = time.monotonic() + min(seconds, LONGEST_WAIT_SECONDS)
        while True:
            ticket = self.ticket(run, what)
            try:
                done, value = await look()
            except DvlaError:
                self.notify(run, what)  # leaves no event behind for a run that is not there
                raise
            left = deadline - time.monotonic()
            if done or left <= 0 or self._closing.is_set():
                return value
            try:
                async with asyncio.timeout(min(left, LOOK_SECONDS)):
                    await ticket.wait()
            except TimeoutError:
                continue

    async def listen(self) -> None:
        """Receive wake-ups for ever; reconnects with bounded backoff. Run as a task beside the server."""
        pause = 0.05
        while True:
            since = time.monotonic()
            try:
                await self._listen_once()
            except (exceptions.RedisError, OSError) as error:
                log.warning("wake-up connection lost; waiters look once a second", error=str(error))
            pause = 0.05 if time.monotonic() - since > _PING_SECONDS else min(pause * 2, 2.0)
            await asyncio.sleep(pause)

    async def _listen_once(self) -> None:
        client = self._link.new_client()
        try:
            async with client.pubsub() as channel:
                async with asyncio.timeout(COMMAND_SECONDS):
                    await channel.psubscribe(WAKE_PATTERN)
                silent = False
                while True:
                    message = await channel.get_message(timeout=_PING_SECONDS)
                    if message is None and silent:
                        raise exceptions.TimeoutError(f"no answer to a ping for {_PING_SECONDS:.0f} s")
                    if message is None:
                        async with asyncio.timeout(_PING_SECONDS):
                            await channel.ping()
                    silent = message is None
                    if message is not None:
                        self._receive(message)
        finally:
            await client.aclose()
            await client.connection_pool.disconnect()

    def _receive(self, message: dict[str, Any]) -> None:
        if message["type"] == "pmessage":
            self.notify(run_of_channel(message["channel"].decode()), message["data"].decode())
        elif message["type"] == "psubscribe":  # something may have happened before
            for run, what in list(self._events):
                self.notify(run, what)
