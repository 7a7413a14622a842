"""Many readers under fast publishes: whole versions only, never older ones, whichever way the bytes travel."""

import threading
import time
from pathlib import Path
from typing import Any

from services.common.bundle import Manifest, Version
from services.common.errors import Exhausted, NotFound
from services.common.weights_client import WeightPublisher, WeightSubscriber, fetch_once
from tests.weights.hosting import Host, check_stamp, stamped

VERSIONS = 60


class Reader:
    """Checks each version it gets, and that none is older than the one before."""

    def __init__(self, address: str, folder: str, delay: float) -> None:
        self.got: list[Version] = []
        self._delay = delay
        self.subscriber = WeightSubscriber(address, "policy", self._receive, folder=folder)
        self.subscriber.start()

    def _receive(self, manifest: Manifest, buffer: Any) -> None:
        check_stamp(manifest, buffer)
        time.sleep(self._delay)
        check_stamp(manifest, buffer)  # ours until we return
        self.got.append(manifest.version)


def test_readers_see_whole_versions_in_order(host: Host, folder: Path) -> None:
    address = host.start(max_files=5, durable_folder="")
    shm, apart = str(folder / "shm"), str(folder / "apart")
    readers = [Reader(address, place, delay) for place in (shm, apart) for delay in (0, 0.02, 0.2)]
    writer = WeightPublisher(address, "policy", folder=shm)
    published: list[Version] = []
    done = threading.Event()
    problems: list[str] = []

    def pick() -> None:
        """Fetches single versions by number, which may be retired, but never wrong."""
        while not done.is_set():
            wanted = published[-1] if published else None
            try:
                manifest, buffer = fetch_once(address, "policy", wanted, folder=shm)
            except NotFound:
                continue
            check_stamp(manifest, buffer)
            if wanted is not None and manifest.version != wanted:
                problems.append(f"asked for {wanted}, got {manifest.version}")
            done.wait(0.01)

    picker = threading.Thread(target=pick)
    picker.start()
    try:
        for update in range(VERSIONS):
            try:
                published.append(writer.publish(*stamped(1 + update // 20, update, size=2000)))
            except Exhausted:  # slow readers make us skip a version, never the other way round
                continue
            time.sleep(0.02)
        for reader in readers:
            assert reader.subscriber.wait(published[-1], 30) == published[-1]
    finally:
        done.set()
        picker.join()
        for reader in readers:
            reader.subscriber.close()
        writer.close()
    assert not problems
    assert len(published) > VERSIONS // 2
    for reader in readers:
        assert reader.got == sorted(set(reader.got))
        assert set(reader.got) <= set(published)
        assert not reader.subscriber.status.errors, reader.subscriber.status
    assert {reader.subscriber.status.transport for reader in readers} == {"shm", "grpc"}
