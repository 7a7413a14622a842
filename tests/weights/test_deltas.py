"""Deltas on their way: publisher to root, root to relay and reader; a strict base, dense anchors, late joiners."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from dvla.v1 import common_pb2, weights_pb2

from services.common import delta
from services.common.bundle import Manifest, Version, bundle, verify
from services.common.bundle_wire import manifest_to_proto, version_to_proto
from services.common.delta import DeltaRule
from services.common.sinks import Bytes
from services.common.spec import Array
from services.common.weights_client import WeightPublisher, WeightSubscriber, fetch_once
from services.weights import relay
from tests.weights.hosting import Host, stub_of

V = Version
SIZE = 200_000


def sparse(update: int, epoch: int = 1) -> tuple[Manifest, Bytes]:
    """A version of which one element in fifty differs from the version before."""
    weights = np.random.default_rng(0).integers(0, 2**16, SIZE, dtype=np.uint16)
    for step in range(1, update + 1):
        weights[step::50] += 1
    arrays: dict[str, Array] = {"w": weights, "step": np.array(update)}
    return bundle("policy", V(epoch, update), arrays, {"w": "bfloat16"})


def metrics(host: Host, name: str = "root") -> dict[str, float]:
    return host.server(name).telemetry.metrics()


def apart(folder: Path, name: str) -> str:
    """A folder of its own stands for another machine."""
    return str(folder / name)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_publisher_elsewhere_sends_deltas_and_an_anchor_now_and_then(host: Host, folder: Path) -> None:
    address = host.start()
    writer = WeightPublisher(address, "policy", folder=apart(folder, "far"), rule=DeltaRule(anchor=4))
    sent = []
    for update in range(7):
        writer.publish(*sparse(update))
        sent.append(writer.sent.split()[0])
        manifest, buffer = fetch_once(address, "policy", folder=apart(folder, "shm"))
        assert manifest == sparse(update)[0]
        assert buffer.tobytes() == sparse(update)[1].tobytes()
    assert sent == ["whole", "delta", "delta", "delta", "whole", "delta", "delta"]
    assert "2." in writer.sent  # the measured density
    writer.publish(*sparse(7, epoch=2))
    assert writer.sent == "whole"
    writer.close()


def test_many_changes_travel_whole(host: Host, folder: Path) -> None:
    writer = WeightPublisher(host.start(), "policy", folder=apart(folder, "far"), rule=DeltaRule(density=0.01))
    for update in range(3):
        writer.publish(*sparse(update))
        assert writer.sent == "whole"
    writer.close()


def test_a_restarted_root_has_the_base_on_disk(host: Host, folder: Path) -> None:
    address = host.start()
    writer = WeightPublisher(address, "policy", folder=apart(folder, "far"))
    writer.publish(*sparse(0))
    host.stop()
    host.start()
    writer.publish(*sparse(1))
    assert writer.sent.startswith("delta")
    host.stop()
    host.start(durable_folder=str(folder / "another disk"))
    writer.publish(*sparse(2))
    assert writer.sent == "whole"
    assert fetch_once(address, "policy")[1].tobytes() == sparse(2)[1].tobytes()
    writer.close()


def test_readers_elsewhere_get_deltas_and_late_joiners_the_whole(host: Host, folder: Path) -> None:
    """The publisher shares memory with the root, so the root makes the delta when it is first asked for."""
    address = host.start()
    got: list[Version] = []

    def receive(manifest: Manifest, buffer: Any) -> None:
        verify(manifest, buffer)
        got.append(manifest.version)

    writer = WeightPublisher(address, "policy", folder=apart(folder, "shm"))
    reader = WeightSubscriber(address, "policy", receive, folder=apart(folder, "far"))
    reader.start()
    for update in range(4):
        writer.publish(*sparse(update))
        assert reader.wait(V(1, update), 20) == V(1, update)
    assert reader.status.transport == "delta"
    assert (metrics(host)["fetches/grpc"], metrics(host)["fetches/delta"]) == (1, 3)
    late = WeightSubscriber(address, "policy", receive, folder=apart(folder, "farther"))
    late.start()
    assert late.wait(V(1, 3), 20) == V(1, 3)
    assert late.status.transport == "grpc"
    assert not reader.status.errors
    for one in (reader, late):
        one.close()
    writer.close()


@pytest.mark.parametrize("lost", ["base", "content"])
def test_a_relay_without_the_base_takes_the_whole(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(relay, "DISCOVER_SECONDS", 0.05)
    root = host.start()
    host.start("near", upstream=root, durable_folder="", shared=apart(folder, "node"))
    writer = WeightPublisher(root, "policy", folder=apart(folder, "shm"))
    near = host.server("near").depot
    for update in (0, 1):
        writer.publish(*sparse(update))
        wait_for(lambda: near.newest("policy") == V(1, update))  # noqa: B023 - called at once
    assert (metrics(host)["fetches/grpc"], metrics(host)["fetches/delta"]) == (1, 1)
    if lost == "base":
        host.stop("near")
        writer.publish(*sparse(2))
        host.start("near", upstream=root, durable_folder="", shared=apart(folder, "node"))
    else:
        with near.open("policy") as reading:  # memory that went bad: the delta applies, the hash does not
            pool = near._pool
            slot = next(slot for slot in pool._slots.values() if slot.file.name == reading.file.name)
            slot.file.view[0] ^= 255
        writer.publish(*sparse(2))
    near = host.server("near").depot
    wait_for(lambda: near.newest("policy") == V(1, 2))
    assert metrics(host)["fetches/grpc"] == 2
    with near.open("policy") as reading:
        assert reading.view.tobytes() == sparse(2)[1].tobytes()
    writer.close()


def test_a_relay_passes_deltas_on(host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DISCOVER_SECONDS", 0.05)
    root = host.start()
    near = host.start("near", upstream=root, durable_folder="", shared=apart(folder, "node"))
    writer = WeightPublisher(root, "policy", folder=apart(folder, "far"))
    reader = WeightSubscriber(near, "policy", verify, folder=apart(folder, "farther"))
    reader.start()
    for update in range(3):
        writer.publish(*sparse(update))
        assert reader.wait(V(1, update), 20) == V(1, update)
    assert writer.sent.startswith("delta")
    assert metrics(host)["fetches/delta"] == 2
    assert metrics(host, "near")["fetches/delta"] == 2
    reader.close()
    writer.close()


def publish_raw(address: str, manifest: Manifest, base: Version, data: bytes, **fields: Any) -> grpc.StatusCode:
    head = {"base": version_to_proto(base), "encoding": delta.ENCODING, "length": len(data)} | fields
    begin = weights_pb2.PublishBegin(manifest=manifest_to_proto(manifest), delta=weights_pb2.Delta(**head))
    messages = [
        weights_pb2.PublishRequest(begin=begin),
        *(weights_pb2.PublishRequest(frame=common_pb2.Frame(offset=0, data=data)) for _ in range(bool(data))),
    ]
    with stub_of(address) as stub:
        try:
            stub.Publish(iter(messages), timeout=10)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_wrong_deltas_are_refused_and_change_nothing(host: Host, folder: Path) -> None:
    address = host.start()
    writer = WeightPublisher(address, "policy", folder=apart(folder, "shm"))
    writer.publish(*sparse(1))
    manifest, buffer = sparse(2)
    coded = delta.encode(manifest.layout, V(1, 1), sparse(1)[1], buffer)
    assert coded is not None
    damaged = bytearray(coded.data)
    damaged[-1] ^= 255
    wrong_base = delta.encode(manifest.layout, V(1, 1), sparse(0)[1], sparse(1)[1])
    assert wrong_base is not None
    status = grpc.StatusCode
    assert publish_raw(address, manifest, V(1, 0), coded.data) == status.FAILED_PRECONDITION
    assert publish_raw(address, manifest, V(1, 1), coded.data, encoding="xor") == status.FAILED_PRECONDITION
    assert publish_raw(address, manifest, V(1, 1), coded.data, length=2**40) == status.INVALID_ARGUMENT
    assert publish_raw(address, manifest, V(1, 1), coded.data[:-1], length=len(coded.data)) == status.INVALID_ARGUMENT
    assert publish_raw(address, manifest, V(1, 1), bytes(damaged)) == status.INVALID_ARGUMENT
    assert publish_raw(address, manifest, V(1, 1), wrong_base.data) == status.INVALID_ARGUMENT
    assert fetch_once(address, "policy")[0].version == V(1, 1)
    assert publish_raw(address, manifest, V(1, 1), coded.data) == status.OK
    assert fetch_once(address, "policy")[1].tobytes() == buffer.tobytes()
    assert [info.state for info in host.server().depot.versions()] == ["sealed", "sealed"]
    writer.close()
