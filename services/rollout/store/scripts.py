"""Runs the Lua scripts of `lua/`: one atomic state change each. Shared parts stand in front of every script."""

from collections.abc import Callable
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, cast

from redis import exceptions

from services.rollout.store.keys import meta_key
from services.rollout.store.redis_client import RedisLink

Argument = str | bytes | int
Reply = list[Any]
_FOLDER = Path(__file__).parent / "lua"
_SHARED = ("lib", "jobs", "groups")


@cache
def source(name: str) -> tuple[str, str]:
    """A script's full text and its SHA-1, by which Redis knows it."""
    text = "\n".join((_FOLDER / f"{part}.lua").read_text() for part in (*_SHARED, name))
    return text, sha1(text.encode(), usedforsecurity=False).hexdigest()


def names() -> list[str]:
    """All scripts."""
    return sorted(path.stem for path in _FOLDER.glob("*.lua") if path.stem not in _SHARED)


class Scripts:
    """Calls scripts by hash. skew_ms: milliseconds to add to Redis TIME, for tests that move the clock."""

    def __init__(self, link: RedisLink, skew_ms: Callable[[], int] = lambda: 0) -> None:
        self._link = link
        self._skew_ms = skew_ms

    async def call(self, name: str, run: str, *arguments: Argument) -> Reply:
        """Run one script; its reply starts with a status. Safe to repeat, so a lost reply is asked for again."""
        text, sha = source(name)

        async def once() -> Reply:
            client, key, skew = self._link.client, meta_key(run), self._skew_ms()
            try:
                reply: Any = await client.evalsha(sha, 1, key, skew, *arguments)
            except exceptions.NoScriptError:  # Redis restarted, or has never seen this version
                reply = await client.eval(text, 1, key, skew, *arguments)
            return cast(Reply, reply)

        return await self._link.retrying(name, once)
