"""Drafts, seals, fences and aborts that meet in several threads."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.bundle import Buffer, Manifest, Version
from services.common.errors import InvalidInput, NotFound, Superseded
from services.weights import draft as draft_module
from services.weights.depot import Depot
from services.weights.draft import Draft
from services.weights.durable import Archive
from services.weights.files import FilePool
from tests.weights.hosting import check_stamp, stamped

V = Version


class SlowArchive(Archive):
    """Its disk takes until `go`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entered, self.go = threading.Event(), threading.Event()
        self.saved: list[Version] = []

    def save(self, manifest: Manifest, buffer: Buffer) -> None:
        self.entered.set()
        assert self.go.wait(20)
        self.saved.append(manifest.version)
        super().save(manifest, buffer)


@pytest.fixture
def archive(tmp_path: Path) -> SlowArchive:
    return SlowArchive(tmp_path / "disk")


@pytest.fixture
def depot(tmp_path: Path, archive: SlowArchive) -> Iterator[Depot]:
    (tmp_path / "shm").mkdir()
    depot = Depot(1, FilePool(tmp_path / "shm", 2**30, 3), archive)
    yield depot
    depot.close()


def draft(depot: Depot, epoch: int, update: int) -> Draft:
    manifest, buffer = stamped(epoch, update, size=100)
    new = depot.begin(manifest)
    assert new is not None
    new.write(0, buffer)
    return new


def current(depot: Depot) -> Version:
    with depot.open("policy") as reading:
        check_stamp(reading.manifest, reading.view)
        return reading.manifest.version


class Running:
    """A call in a thread; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 - raised again by result
            self._error = error

    def waits(self) -> bool:
        self._thread.join(0.1)
        return self._thread.is_alive()

    def result(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error:
            raise self._error


def test_a_version_is_readable_before_it_is_durable(depot: Depot, archive: SlowArchive) -> None:
    first = draft(depot, 1, 0)
    sealing = Running(first.seal)
    assert archive.entered.wait(20)
    assert current(depot) == V(1, 0)
    assert depot.durable("policy") is None
    assert sealing.waits()  # the publisher is told when it is durable
    aborting = Running(first.abort)
    assert aborting.waits()  # and an abort comes too late
    others = [draft(depot, 1, update) for update in (1, 2)]  # they get files of their own
    archive.go.set()
    sealing.result()
    aborting.result()
    assert current(depot) == V(1, 0)
    assert depot.durable("policy") == V(1, 0)
    for other in others:
        other.seal()
    assert current(depot) == V(1, 2)


def test_while_the_disk_is_slow_only_the_newest_is_written(depot: Depot, archive: SlowArchive) -> None:
    sealing = [Running(draft(depot, 1, 0).seal)]
    assert archive.entered.wait(20)
    for update in (1, 2):
        sealing.append(Running(draft(depot, 1, update).seal))
        while depot.newest("policy") != V(1, update):
            time.sleep(0.01)
    archive.go.set()
    for running in sealing:
        running.result()
    assert depot.durable("policy") == V(1, 2)
    assert archive.saved == [V(1, 0), V(1, 2)]


def test_after_a_fence_no_version_of_an_older_epoch_appears(
    depot: Depot, archive: SlowArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.go.set()
    draft(depot, 1, 0).seal()
    checking, go = threading.Event(), threading.Event()

    def slow(manifest: Manifest, buffer: Buffer) -> None:
        checking.set()
        assert go.wait(20)

    late = draft(depot, 1, 1)
    monkeypatch.setattr(draft_module, "verify", slow)
    sealing = Running(late.seal)
    assert checking.wait(20)
    assert depot.fence("policy", 2) == V(1, 0)
    go.set()
    with pytest.raises(Superseded):
        sealing.result()
    late.abort()
    assert current(depot) == V(1, 0)


def test_of_two_tries_of_one_publish_both_succeed(depot: Depot, archive: SlowArchive) -> None:
    tries = [draft(depot, 1, 0) for _ in range(2)]
    sealing = [Running(one.seal) for one in tries]
    archive.go.set()
    for running in sealing:
        running.result()
    for one in tries:
        one.abort()
    assert [(info.version, info.state) for info in depot.versions()] == [(V(1, 0), "sealed")]


def test_an_overtaken_draft_is_refused_and_its_file_given_back(depot: Depot, archive: SlowArchive) -> None:
    archive.go.set()
    slow = draft(depot, 1, 0)
    draft(depot, 1, 1).seal()
    with pytest.raises(Superseded, match="not newer"):
        slow.seal()
    slow.abort()
    slow.abort()
    assert [info.version for info in depot.versions()] == [V(1, 1)]
    for update in range(2, 9):
        draft(depot, 1, update).seal()


def test_an_unfinished_draft_is_invisible(depot: Depot) -> None:
    manifest, buffer = stamped(1, 0)
    unfinished = depot.begin(manifest)
    assert unfinished is not None
    unfinished.write(256, buffer[256:512])
    assert [info.state for info in depot.versions()] == ["writing"]
    with pytest.raises(NotFound):
        depot.open("policy")
    with pytest.raises(InvalidInput, match=r"bytes 0 to 256 were not sent \(tensor 'layer.weight'"):
        unfinished.seal()
    unfinished.abort()
    ended = draft(depot, 1, 0)
    ended.abort()
    with pytest.raises(ValueError, match="aborted or sealed"):
        ended.seal()


def test_listeners_hear_of_seals(depot: Depot, archive: SlowArchive) -> None:
    archive.go.set()
    heard: list[tuple[str, Version | None]] = []
    depot.listen(lambda model: heard.append((model, depot.newest(model))))
    draft(depot, 1, 0).seal()
    draft(depot, 1, 1).abort()
    assert heard == [("policy", V(1, 0))]
