"""`dvla store inspect` and `dead`: what they show of a real store, and what they change."""

import asyncio
import json
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.__main__ import main
from services.common.redis_server import RedisServer
from services.rollout.store.config import StoreConfig
from services.rollout.store.server import StoreServer
from tests.rollout.store.harness import Clock, Harness, make_spec

pytestmark = pytest.mark.redis


class Running:
    """A store in a thread of its own, with one run: group 1 refused, 2 trained, 3 leased, 4 open."""

    def __init__(self, address: str, redis: str) -> None:
        self.address, self._redis = address, redis
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        server = StoreServer(StoreConfig(listen=self.address, redis=self._redis, drain_seconds=0, bytes_in="redis"))
        await server.start()
        run = Harness(server.store, Clock(), make_spec(staleness=3, groups_per_update=1))
        await run.open()
        await run.fill(3)
        await run.leased()
        await run.nack(1, "member 0: 'log_prob' holds a value that is not finite")
        await run.trained(1, [2])
        await run.append((await run.jobs(1, worker="worker-7"))[0])
        await run.jobs(1, worker="worker-7")
        self.run = run.run
        self._ready.set()
        await self._stopping.wait()
        await server.stop()


@pytest.fixture
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="dvla-") as folder:
        redis = RedisServer(Path(folder) / "redis")
        redis.start()
        running = Running(f"unix:{folder}/store.sock", redis.url)
        running.start()
        yield running
        running.stop()
        redis.stop()


def test_a_store_can_be_looked_into(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "inspect", running.address, "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)
    (run,) = reply["runs"]
    assert (run["run"], run["stream_entries"], run["stream_pending"], run["dead_letters"]) == (running.run, *"221")
    groups = [(group["group"], group["state"], group["filled"], group["workers"]) for group in run["groups"]]
    assert groups == [("2", "trained", 2, []), ("3", "leased", 2, []), ("4", "open", 1, ["worker-7"])]
    assert all(int(group["bytes"]) > 0 and group["age_seconds"] >= 0 for group in run["groups"])
    assert "version" in reply["redis"]

    assert main(["store", "inspect", running.address, "--groups", "1"]) == 0
    shown = capsys.readouterr().out
    assert running.run in shown.replace("\n", "")
    assert "trained" in shown
    assert "leased" not in shown.split("groups of")[1]


def test_dead_groups_are_listed_with_their_reason_and_put_back(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [running.address, "--run", running.run]
    assert main(["store", "dead", "list", *where]) == 0
    shown = capsys.readouterr().out
    assert "1 dead letters" in shown
    assert "not finite" in re.sub(r"[\s│]+", " ", shown)
    assert main(["store", "dead", "list", *where, "--json"]) == 0
    (letter,) = json.loads(capsys.readouterr().out)["letters"]
    assert main(["store", "dead", "replay", running.address, letter["id"], "--run", running.run]) == 0
    assert capsys.readouterr().out == "group 1 is back\n"
    assert main(["store", "dead", "replay", *where, "--all"]) == 0
    assert "no dead letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["inspect", "no-such-run"], "no-such-run"),
        (["inspect", "unix:/tmp/nobody.sock"], "nobody.sock"),
        (["dead", "list", "unix:/tmp/nobody.sock"], "name it with --run"),
        (["dead", "replay", "unix:/tmp/nobody.sock", "--run", "r"], "--all"),
    ],
)
def test_what_cannot_be_is_one_line(tokens: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", *tokens]) in (1, 2)
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
