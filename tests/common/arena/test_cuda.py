"""The CUDA IPC arena without a GPU: a driver on the CPU stands in for the CUDA calls."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dvla.v1 import common_pb2

from services.common.arena import Arena, Peer, cuda, cuda_driver, cuda_limits
from services.common.arena.cuda import CudaArena, CudaReader
from services.common.arena.cuda_driver import Cudart
from services.common.errors import Exhausted, InvalidInput, NotFound, Unavailable, Unsupported
from services.common.process import boot_id
from tests.common.arena import cuda_processes
from tests.common.arena.fake_cuda import UUID, FakeDriver

LENGTH = 100


@pytest.fixture(autouse=True)
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "impossible", lambda uuid="": "")


class Pair:
    """A producer and a consumer with a driver each."""

    def __init__(self, folder: Path) -> None:
        self.ours, self.theirs = FakeDriver(folder), FakeDriver(folder)
        self.host = Arena.create(folder, "cuda", 4096, entries=8)
        self.arena = CudaArena(self.ours, self.host, 2, LENGTH)
        self.peer = Peer(folder)
        self.target = bytearray(LENGTH)

    def sent(self, value: int, first: bool = False) -> common_pb2.CudaExtent:
        return self.arena.message(self.arena.write(memoryview(bytes([value]) * LENGTH)), first)

    def reader(self, message: common_pb2.CudaExtent) -> CudaReader:
        return CudaReader(self.theirs, self.peer, message)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_consumer_maps_once_and_copies_after_the_event(pair: Pair) -> None:
    message = pair.sent(1, first=True)
    reader = pair.reader(message)
    buffer = pair.theirs.malloc(LENGTH)
    for value in range(2, 30):
        reader.copy(message, buffer)
        pair.theirs.to_host(memoryview(pair.target), buffer)
        assert pair.target == bytes([value - 1]) * LENGTH
        message = pair.sent(value)
        assert not message.memory_handle
    assert pair.theirs.mapped == 2
    assert pair.theirs.events == 2, "one event for each slot"
    assert len(pair.theirs.waited) == 28
    reader.close()
    assert (pair.theirs.mapped, pair.theirs.events) == (1, 0)
    pair.arena.close()
    assert (pair.ours.mapped, pair.ours.events) == (0, 0)
    assert pair.host.extents() == []


def test_a_torn_copy_is_refused(pair: Pair) -> None:
    message = pair.sent(1, first=True)
    reader = pair.reader(message)
    word = pair.host.view(pair.arena._words[message.slot]).view("<u8")

    def overwrite() -> None:
        word[0] += 2

    pair.theirs.during_copy = overwrite
    with pytest.raises(NotFound, match="written anew: sequence 4, expected 2"):
        reader.copy_to_host(message, memoryview(pair.target))
    with pytest.raises(NotFound, match="written anew"):
        reader.copy_to_host(message, memoryview(pair.target))


def test_a_failed_writing_leaves_its_slot_void(pair: Pair) -> None:
    old = pair.sent(1, first=True)
    pair.sent(2)
    reader = pair.reader(old)
    with pytest.raises(RuntimeError), pair.arena.writing(LENGTH) as (_, slot):
        raise RuntimeError("the simulator failed")
    with pytest.raises(NotFound, match="not finished"):
        slot()
    with pytest.raises(NotFound, match="sequence 3"):
        reader.copy_to_host(old, memoryview(pair.target))
    pair.sent(3)
    message = pair.sent(4)
    assert message.slot == old.slot
    reader.copy_to_host(message, memoryview(pair.target))
    assert pair.target == bytes([4]) * LENGTH


def test_slots_that_are_read_are_left_alone(pair: Pair) -> None:
    one, two = pair.sent(1, first=True), pair.sent(2)
    reader = pair.reader(one)
    with reader._holding(one):
        assert [pair.sent(value).slot for value in (3, 4)] == [two.slot] * 2
        with reader._holding(pair.sent(5)), pytest.raises(Exhausted, match="all 2 slots"):
            pair.sent(6)
    assert pair.sent(7).slot == one.slot
    with pytest.raises(InvalidInput, match="do not fit"):
        pair.arena.write(memoryview(bytes(1000)))


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"session": 1}, NotFound, "which is over"),
        ({"gpu_uuid": "GPU-other"}, NotFound, "which is over"),
        ({"offset": 1 << 40}, InvalidInput, "outside"),
        ({"length": 1 << 40}, InvalidInput, "outside"),
        ({"sequence": 3}, InvalidInput, "not finished"),
        ({"event_handle": b"short"}, InvalidInput, "event handle has 5 bytes"),
        ({"word": common_pb2.Extent(arena="../x", length=8)}, InvalidInput, "plain file name"),
        ({"word": common_pb2.Extent(arena="x", length=9)}, InvalidInput, "outside"),
    ],
)
def test_handles_from_the_wire_are_checked(
    pair: Pair, change: dict[str, Any], kind: type[Exception], match: str
) -> None:
    message = pair.sent(1, first=True)
    reader = pair.reader(message)
    for name, value in change.items():
        if isinstance(value, common_pb2.Extent):
            message.word.CopyFrom(value)
        else:
            setattr(message, name, value)
    with pytest.raises(kind, match=match):
        reader.copy_to_host(message, memoryview(pair.target))


def test_an_arena_that_cannot_be_mapped_is_refused(pair: Pair, tmp_path: Path) -> None:
    message = pair.sent(1, first=True)
    with pytest.raises(Unsupported, match="cannot be opened on GPU-b"):
        CudaReader(FakeDriver(tmp_path, "GPU-b"), pair.peer, message)
    message.memory_handle = b""
    with pytest.raises(InvalidInput, match="0 bytes"):
        pair.reader(message)
    message.memory_handle = b"gone".ljust(64, b"\0")
    with pytest.raises(Unavailable, match="void"):
        pair.reader(message)


def test_what_forbids_sharing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_limits, "_DRIVER", tmp_path / "driver")
    assert "no NVIDIA driver" in cuda_limits.impossible()
    (tmp_path / "driver").touch()
    monkeypatch.setattr(cuda_limits, "_TEGRA", tmp_path / "tegra")
    assert cuda_limits.impossible() == ""
    assert "MIG slice" in cuda_limits.impossible("MIG-1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    assert "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments" in cuda_limits.impossible()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    (tmp_path / "tegra").touch()
    assert "integrated" in cuda_limits.impossible()
    (tmp_path / "tegra").unlink()
    peer = common_pb2.Locality(boot_id=boot_id(), gpu_uuids=[UUID], pid_namespace=cuda_limits.pid_namespace())
    assert cuda_limits.unreachable(peer, UUID) == ""
    assert "does not use GPU GPU-b (it uses GPU-fake)" in cuda_limits.unreachable(peer, "GPU-b")
    peer.pid_namespace += 1
    assert "process id namespace" in cuda_limits.unreachable(peer, UUID)
    peer.boot_id = "another"
    assert "another machine" in cuda_limits.unreachable(peer, UUID)


def test_an_arena_is_refused_where_it_is_impossible(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "impossible", lambda uuid="": "a reason")
    with pytest.raises(Unsupported, match="no cuda_ipc: a reason"):
        CudaArena(pair.ours, pair.host, 1, 1)


def used(driver: Any) -> int:
    return int(driver.mapped * 100 + driver.events)


def test_a_hundred_updates_between_processes(tmp_path: Path) -> None:
    cuda_processes.updates_arrive_and_memory_stays_flat(FakeDriver, tmp_path, True, 100, used)


def test_a_killed_consumer_between_processes(tmp_path: Path) -> None:
    cuda_processes.a_killed_consumer_frees_its_slot(FakeDriver, tmp_path, True)


def test_a_killed_producer_between_processes(tmp_path: Path) -> None:
    cuda_processes.a_killed_producer_is_noticed(FakeDriver, tmp_path, True)


class Library:
    """Plays libcudart: remembers the names called, gives 42 where an address is asked for, or fails."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.called = code, list[str]()
        self.cudaGetErrorString = lambda code: b"out of memory"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name in ("cudaMalloc", "cudaIpcOpenMemHandle", "cudaEventCreateWithFlags", "cudaIpcOpenEventHandle"):
                arguments[0]._obj.value = 42
            return self.code

        return call


def test_the_runtime_is_called_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(cuda_driver, "_library", lambda: library)
    driver = Cudart(0, UUID)
    assert (
        driver.malloc(10) == driver.open_memory(bytes(64)) == driver.make_event() == driver.open_event(bytes(64)) == 42
    )
    assert driver.export_memory(42) == driver.export_event(42) == bytes(64)
    for call in (driver.free, driver.close_memory, driver.destroy_event, driver.record, driver.wait):
        call(42)
    driver.to_device(42, memoryview(b"read-only"))
    driver.to_device(42, memoryview(bytearray(8)))
    driver.to_host(memoryview(bytearray(8)), 42)
    driver.on_device(42, 43, 8)
    driver.synchronise()
    assert library.called.count("cudaMemcpyAsync") == 4
    assert len(set(library.called)) == 14
    failing = Library(2)
    monkeypatch.setattr(cuda_driver, "_library", lambda: failing)
    with pytest.raises(Unavailable, match=r"cudaSetDevice failed on GPU-fake: out of memory \(2\)"):
        Cudart(0, UUID)


def test_without_the_runtime_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(cuda_driver, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": missing}))
    with pytest.raises(Unsupported, match="transport shm"):
        cuda_driver._library()
