"""Which simulators a worker drives: names are looked up again and again, and workers share the list fairly."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import structlog

log = structlog.get_logger()


async def resolve(sims: Sequence[str]) -> list[str]:
    """All simulator addresses now, sorted.

    "dns:host:port" becomes one address per record of that name, "file:path" one per line of that file.
    """
    found: set[str] = set()
    for sim in sims:
        if sim.startswith("file:"):
            found.update(_listed(Path(sim.removeprefix("file:"))))
            continue
        if not sim.startswith("dns:"):
            found.add(sim)
            continue
        host, _, port = sim.removeprefix("dns:").rpartition(":")
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            log.debug("name not found yet", name=sim, reason=str(error))
            continue
        for family, _, _, _, address in infos:
            ip = str(address[0])
            found.add(f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}")
    return sorted(found)


def _listed(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError as error:
        log.debug("list of simulators not there yet", path=str(path), reason=str(error))
        return []


def share(addresses: Sequence[str], index: int, workers: int) -> list[str]:
    """This worker's simulators. With more workers than simulators, several share one; its session limit decides
    who gets in."""
    if not addresses:
        return []
    if len(addresses) < workers:
        return [addresses[index % len(addresses)]]
    return list(addresses[index::workers])
