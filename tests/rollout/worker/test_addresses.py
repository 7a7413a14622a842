"""Simulators are found by name and shared fairly."""

import asyncio
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.worker.addresses import resolve, share


@given(sims=st.integers(1, 40), workers=st.integers(1, 40))
def test_every_simulator_is_served_by_one_worker_and_every_worker_has_one(sims: int, workers: int) -> None:
    addresses = [f"sim-{n}:1" for n in range(sims)]
    shares = [share(addresses, index, workers) for index in range(workers)]
    served = Counter(address for mine in shares for address in mine)
    assert set(served) == set(addresses)
    assert all(shares)
    if sims >= workers:
        assert set(served.values()) == {1}
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert [len(mine) for mine in shares] == [1] * workers
        assert max(served.values()) - min(served.values()) <= 1


def test_without_simulators_there_is_nothing_to_share() -> None:
    assert share([], 3, 7) == []


async def test_plain_addresses_are_taken_as_they_are() -> None:
    assert await resolve(["unix:/b", "a:1", "unix:/b"]) == ["a:1", "unix:/b"]


async def test_a_name_stands_for_all_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lookup(host: str, port: str, **options: Any) -> list[Any]:
        if host != "sim":
            raise socket.gaierror("not known")
        v4 = [(socket.AF_INET, 1, 6, "", (ip, int(port))) for ip in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]
        return [*v4, (socket.AF_INET6, 1, 6, "", ("fd00::1", int(port), 0, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    found = await resolve(["dns:sim:50051", "dns:gone:50051", "x:1"])
    assert found == ["10.0.0.1:50051", "10.0.0.2:50051", "[fd00::1]:50051", "x:1"]
    assert await resolve(["dns:gone:50051"]) == []


async def test_a_real_name_is_looked_up() -> None:
    assert "127.0.0.1:7" in await resolve(["dns:localhost:7"])


async def test_a_file_lists_simulators_and_may_change(tmp_path: Path) -> None:
    file = tmp_path / "sims.txt"
    assert await resolve([f"file:{file}"]) == []
    file.write_text("unix:/run/b.sock\nunix:/run/a.sock\n")
    assert await resolve([f"file:{file}", "host:1"]) == ["host:1", "unix:/run/a.sock", "unix:/run/b.sock"]
    file.write_text("unix:/run/a.sock\n")
    assert await resolve([f"file:{file}"]) == ["unix:/run/a.sock"]
