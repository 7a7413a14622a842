"""The weights service over real Unix sockets: publish, watch, fetch, hold, fence, resume, restart."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from dvla.v1 import common_pb2, weights_pb2

from services.common.bundle import Buffer, Manifest, Version, memory
from services.common.bundle_wire import manifest_to_proto, version_to_proto
from services.common.codec import frames
from services.common.errors import Exhausted, InvalidInput, NotFound, Superseded, Unavailable, Unsupported
from services.common.flatfile import FlatFile
from services.common.weights_client import WeightPublisher, WeightSubscriber, fetch_once
from services.weights import servicer
from tests.weights.hosting import Host, check_stamp, stamped, stub_of

V = Version


def publisher(address: str, folder: Path, model: str = "policy", **settings: Any) -> WeightPublisher:
    return WeightPublisher(address, model, folder=str(folder / "shm"), **settings)


def messages(manifest: Manifest, buffer: Buffer, upto: int | None = None) -> Iterator[weights_pb2.PublishRequest]:
    yield weights_pb2.PublishRequest(begin=weights_pb2.PublishBegin(manifest=manifest_to_proto(manifest)))
    for frame in frames(memory(buffer)[:upto]):
        yield weights_pb2.PublishRequest(frame=frame)


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_published_is_watched_and_fetched(host: Host, folder: Path, shared: bool) -> None:
    address = host.start()
    seen: list[Version] = []

    def receive(manifest: Manifest, buffer: Any) -> None:
        check_stamp(manifest, buffer)
        seen.append(manifest.version)

    place = str(folder / ("shm" if shared else "elsewhere"))
    writer = WeightPublisher(address, "policy", folder=place)
    reader = WeightSubscriber(address, "policy", receive, folder=place)
    reader.start()
    try:
        assert writer.fence(1) is None
        for update in range(3):
            assert writer.publish(*stamped(1, update)) == V(1, update)
            assert reader.wait(V(1, update), 20) == V(1, update)
        assert seen == [V(1, 0), V(1, 1), V(1, 2)]
        assert reader.status.transport == ("shm" if shared else "grpc")
        check_stamp(*fetch_once(address, "policy", folder=place))
        check_stamp(*fetch_once(address, "policy", V(1, 1), folder=place))
        with pytest.raises(NotFound, match="the newest is 1-2"):
            fetch_once(address, "policy", V(1, 0), folder=place)
        with pytest.raises(NotFound, match="no version of 'other'"):
            fetch_once(address, "other", folder=place)
    finally:
        reader.close()
        writer.close()
    assert not reader.status.errors


def test_old_versions_and_old_epochs_are_refused(host: Host, folder: Path) -> None:
    address = host.start()
    old, new = publisher(address, folder), publisher(address, folder)
    old.fence(1)
    old.publish(*stamped(1, 5))
    assert old.publish(*stamped(1, 5)) == V(1, 5)  # a repeat of the very same is harmless
    for update in (4, 5):
        with pytest.raises(Superseded, match="not newer"):
            old.publish(*stamped(1, update, size=100))
    assert new.fence(2) == V(1, 5)
    with pytest.raises(Superseded, match="epoch 1 of policy is over"):
        old.publish(*stamped(1, 6))
    with pytest.raises(Superseded, match="epoch 2 has been fenced"):
        old.fence(1)
    with pytest.raises(Superseded):
        old.ensure()
    assert new.publish(*stamped(2, 0)) == V(2, 0)
    assert fetch_once(address, "policy")[0].version == V(2, 0)
    old.close()
    new.close()


def test_a_wrong_hash_names_the_tensor_and_changes_nothing(host: Host, folder: Path) -> None:
    address = host.start()
    manifest, buffer = stamped(1, 1)
    for place in ("shm", "elsewhere"):
        writer = WeightPublisher(address, "policy", folder=str(folder / place))
        if place == "shm":
            writer.publish(*stamped(1, 0))
        damaged = buffer.copy()
        damaged[manifest.layout.tensors[2].offset] ^= 1
        with pytest.raises(InvalidInput, match=r"tensor 'layer.bias' float32\[7\] of policy 1-1 has hash"):
            writer.publish(manifest, damaged)
        assert fetch_once(address, "policy")[0].version == V(1, 0)
        writer.close()


def test_an_aborted_publish_leaves_the_previous_version_current(host: Host, folder: Path) -> None:
    address = host.start(max_files=3)
    writer = publisher(address, folder)
    writer.publish(*stamped(1, 0))
    manifest, buffer = stamped(1, 1)
    for _ in range(6):  # more often than there are files: each is given back
        started, leave = threading.Event(), threading.Event()

        def halting(started: threading.Event = started, leave: threading.Event = leave) -> Iterator[Any]:
            yield from messages(manifest, buffer, 600_000)
            started.set()
            leave.wait(20)

        with stub_of(address) as stub:
            call = stub.Publish.future(halting(), timeout=30)
            assert started.wait(20)
            call.cancel()
            leave.set()
        check_stamp(*fetch_once(address, "policy"))
    with stub_of(address) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Publish(messages(manifest, buffer, 600_000), timeout=20)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes 600000 to 1000448 were not sent (tensor 'layer.weight'" in (caught.value.details() or "")
    assert writer.publish(manifest, buffer) == V(1, 1)
    writer.close()


def test_a_fetch_is_resumed_by_offset(host: Host, folder: Path) -> None:
    address = host.start()
    writer = publisher(address, folder)
    manifest, buffer = stamped(1, 0, size=20_000)
    writer.publish(manifest, buffer)
    with stub_of(address) as stub:
        for offset in (0, 1, 2**20, manifest.length - 1, manifest.length):
            replies = list(stub.Fetch(weights_pb2.FetchRequest(model="policy", offset=offset), timeout=20))
            assert replies[0].begin.manifest.version.epoch == 1
            data = b"".join(reply.frame.data for reply in replies[1:])
            assert data == buffer[offset:].tobytes()
            assert [reply.frame.offset for reply in replies[1:2]] == ([offset] if offset < manifest.length else [])
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Fetch(weights_pb2.FetchRequest(model="policy", offset=manifest.length + 1), timeout=20))
        assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE
    writer.close()


def test_a_hold_keeps_a_version_and_its_end_lets_it_go(host: Host, folder: Path) -> None:
    address = host.start(keep=1)
    writer = publisher(address, folder)
    writer.publish(*stamped(1, 0))

    def hold(stub: Any, seconds: float, update: int = 0) -> None:
        request = weights_pb2.HoldRequest(
            model="policy", version=version_to_proto(V(1, update)), holder="eval", seconds=seconds
        )
        stub.Hold(request, timeout=10)

    with stub_of(address) as stub:
        hold(stub, 60)
        for update in (1, 2, 3):
            writer.publish(*stamped(1, update))
        check_stamp(*fetch_once(address, "policy", V(1, 0)))
        listed = stub.ListVersions(weights_pb2.ListVersionsRequest(), timeout=10).versions
        states = {info.version.update: (info.state, list(info.readers)) for info in listed}
        assert states[0] == ("sealed", ["eval"])
        assert states[3] == ("sealed", [])
        assert [info.version.update for info in listed] == sorted(states, reverse=True)
        hold(stub, 0)
        with pytest.raises(NotFound):
            fetch_once(address, "policy", V(1, 0))
        with pytest.raises(grpc.RpcError) as caught:
            hold(stub, 60, 7)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    writer.close()


def test_the_newest_version_and_the_fence_are_back_after_a_restart(host: Host, folder: Path) -> None:
    address = host.start()
    writer = publisher(address, folder)
    writer.fence(1)
    for update in range(4):
        writer.publish(*stamped(1, update))
    writer.fence(2)
    reader = WeightSubscriber(address, "policy", check_stamp)
    reader.start()
    assert reader.wait(V(1, 3), 20) == V(1, 3)
    host.stop()
    host.start()
    check_stamp(*fetch_once(address, "policy"))
    assert fetch_once(address, "policy")[0] == stamped(1, 3)[0]
    with pytest.raises(Superseded, match="epoch 2 has been fenced"):
        writer.publish(*stamped(1, 4))
    writer.publish(*stamped(2, 4))
    assert reader.wait(V(2, 4), 20) == V(2, 4)
    reader.close()
    writer.close()


def test_a_root_that_lost_its_disk_gets_the_version_again(host: Host, folder: Path) -> None:
    address = host.start()
    writer = publisher(address, folder)
    writer.fence(3)
    assert writer.ensure() is False
    writer.publish(*stamped(3, 7))
    assert writer.ensure() is False
    host.stop()
    host.start(durable_folder=str(folder / "another disk"))
    assert writer.ensure() is True
    check_stamp(*fetch_once(address, "policy"))
    assert writer.ensure() is False
    with pytest.raises(Superseded):
        publisher(address, folder).fence(2)
    writer.close()


def test_a_refused_version_is_not_sent_again(host: Host, folder: Path) -> None:
    writer = publisher(host.start(), folder)
    manifest, buffer = stamped(1, 0)
    with pytest.raises(InvalidInput):
        writer.publish(manifest, np.roll(buffer, 1))
    assert writer.ensure() is False
    writer.close()


def test_without_room_in_shared_memory_a_publish_goes_by_frames(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = host.start()
    writer = publisher(address, folder)

    def full(self: FlatFile, length: int) -> None:
        monkeypatch.undo()
        raise Exhausted("no room")

    monkeypatch.setattr(FlatFile, "start", full)
    assert writer.publish(*stamped(1, 0)) == V(1, 0)
    assert not list((folder / "shm").glob("publish*"))
    check_stamp(*fetch_once(address, "policy"))
    writer.close()


def test_calls_wait_for_an_absent_server_and_give_up_in_the_end(folder: Path) -> None:
    writer = publisher(f"unix:{folder}/nobody.sock", folder, patience=0.3)
    with pytest.raises(Unavailable, match=r"nobody\.sock"):
        writer.publish(*stamped(1, 0))
    writer.close()


def test_a_reader_that_starts_before_the_server_gets_the_first_version(host: Host, folder: Path) -> None:
    address = f"unix:{folder}/root.sock"
    reader = WeightSubscriber(address, "policy", check_stamp)
    reader.start()
    assert host.start() == address
    writer = publisher(address, folder)
    writer.publish(*stamped(1, 0))
    assert reader.wait(None, 20) == V(1, 0)
    reader.close()
    writer.close()


def test_a_failing_callback_is_counted_and_the_version_tried_again(host: Host, folder: Path) -> None:
    address = host.start()
    tries: list[Version] = []

    def receive(manifest: Manifest, buffer: Any) -> None:
        tries.append(manifest.version)
        if len(tries) < 3:
            raise RuntimeError("does not fit")

    reader = WeightSubscriber(address, "policy", receive)
    reader.start()
    writer = publisher(address, folder)
    writer.publish(*stamped(1, 0))
    assert reader.wait(V(1, 0), 20) == V(1, 0)
    assert tries == [V(1, 0)] * 3
    assert reader.status.errors == 2
    assert "does not fit" in reader.status.last_error
    reader.close()
    writer.close()


def test_a_publisher_that_falls_silent_gives_its_file_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "IDLE_SECONDS", 0.2)
    address = host.start()
    manifest, buffer = stamped(1, 0)
    leave = threading.Event()

    def silent() -> Iterator[Any]:
        yield from messages(manifest, buffer, 600_000)
        leave.wait(20)

    with stub_of(address) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Publish(silent(), timeout=20)
    leave.set()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "sent nothing for 0.2 s" in (caught.value.details() or "")
    assert host.server().depot.versions() == []


def test_a_watch_gives_signs_of_life(host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "HEARTBEAT_SECONDS", 0.05)
    address = host.start()
    with stub_of(address) as stub:
        watch = stub.Watch(weights_pb2.WatchRequest(model="policy", have=common_pb2.Version(epoch=1)), timeout=20)
        assert not next(watch).HasField("newest")
        writer = publisher(address, folder)
        writer.publish(*stamped(1, 0))
        while not (message := next(watch)).HasField("newest"):
            pass
        assert message.newest == next(watch).newest == common_pb2.Version(epoch=1)
        watch.cancel()
        writer.close()


@pytest.mark.parametrize(
    ("arena", "offset", "length"),
    [("../x", 4096, 0), ("absent.flat", 4096, 0), ("absent.flat", 0, 0), ("absent.flat", 4096, 2**63)],
)
def test_extents_are_checked(host: Host, arena: str, offset: int, length: int) -> None:
    manifest, _ = stamped(1, 0)
    extent = common_pb2.Extent(arena=arena, offset=offset, length=length or manifest.length, generation=1)
    begin = weights_pb2.PublishBegin(manifest=manifest_to_proto(manifest), shm=extent)
    with stub_of(host.start()) as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Publish(iter([weights_pb2.PublishRequest(begin=begin)]), timeout=10)
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


@pytest.mark.parametrize("shared", [True, False])
def test_when_readers_hold_all_files_the_publisher_is_told_to_go_on(host: Host, folder: Path, shared: bool) -> None:
    address = host.start(keep=1, max_files=2)
    writer = WeightPublisher(address, "policy", folder=str(folder / ("shm" if shared else "elsewhere")), files=2)
    writer.publish(*stamped(1, 0))
    depot = host.server().depot
    with depot.open("policy") as slow:
        writer.publish(*stamped(1, 1))  # 1-0 is retired, but its file is being read
        with pytest.raises(Exhausted, match="readers hold"):
            writer.publish(*stamped(1, 2))
        assert bool(depot.tend(seconds=0)) is not shared  # names the locked file, if it is the server's own
        assert slow.view[:4].tobytes() == stamped(1, 0)[1][:4].tobytes()
    writer.publish(*stamped(1, 3))
    assert depot.tend(seconds=0) == []
    check_stamp(*fetch_once(address, "policy"))
    writer.close()


def test_relays_refuse_publishes_and_fences(host: Host, folder: Path) -> None:
    host.start()
    relay = publisher(host.start("relay", upstream=f"unix:{folder}/root.sock"), folder)
    with pytest.raises(Unsupported, match="at the root"):
        relay.fence(1)
    with pytest.raises(Unsupported, match="at the root"):
        relay.publish(*stamped(1, 0))
    relay.close()
