"""Relays: a chain serves what the root has; readers turn to the root when a relay dies, never to an older version."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from services.common.bundle import Version
from services.common.weights_client import WeightPublisher, WeightSubscriber, fetch_once
from services.weights import relay, servicer
from tests.weights.hosting import Host, check_stamp, process, stamped

V = Version


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "DISCOVER_SECONDS", 0.1)


def start_relay(host: Host, name: str, upstream: str, **settings: Any) -> str:
    return host.start(name, upstream=upstream, durable_folder="", **settings)


def test_a_chain_of_two_serves_every_model(host: Host, folder: Path) -> None:
    root = host.start()
    near = start_relay(host, "near", root)
    far = start_relay(host, "far", near)
    writers = {model: WeightPublisher(root, model) for model in ("policy", "critic")}
    readers = {model: WeightSubscriber(far, model, check_stamp, folder=str(folder / "apart")) for model in writers}
    for reader in readers.values():
        reader.start()
    for update in range(3):
        for model, writer in writers.items():
            writer.publish(*stamped(1, update, model=model))
            assert readers[model].wait(V(1, update), 30) == V(1, update)
    check_stamp(*fetch_once(far, "critic", V(1, 2)))
    # One transfer for each version and hop: with one relay per node that is once per node.
    metrics = host.server().telemetry.metrics()
    assert metrics["fetches/shm"] == 6
    assert "fetches/grpc" not in metrics
    for writer in writers.values():
        writer.close()
    for reader in readers.values():
        reader.close()


def test_a_relay_waits_for_its_root(host: Host, folder: Path) -> None:
    near = start_relay(host, "near", f"unix:{folder}/root.sock")
    reader = WeightSubscriber(near, "policy", check_stamp)
    reader.start()
    writer = WeightPublisher(host.start(), "policy")
    writer.publish(*stamped(1, 0))
    assert reader.wait(V(1, 0), 30) == V(1, 0)
    reader.close()
    writer.close()


def test_readers_turn_to_the_root_when_the_relay_dies(host: Host, folder: Path) -> None:
    root = host.start()
    near = start_relay(host, "near", root)
    got: list[Version] = []

    def receive(manifest: Any, buffer: Any) -> None:
        check_stamp(manifest, buffer)
        got.append(manifest.version)

    reader = WeightSubscriber((near, root), "policy", receive)
    reader.start()
    writer = WeightPublisher(root, "policy")
    writer.publish(*stamped(1, 0))
    assert reader.wait(V(1, 0), 30) == V(1, 0)
    assert reader.status.address == near
    host.stop("near")
    writer.publish(*stamped(1, 1))
    assert reader.wait(V(1, 1), 30) == V(1, 1)
    assert reader.status.address == root
    assert got == [V(1, 0), V(1, 1)]
    reader.close()
    writer.close()


def test_an_older_server_is_never_followed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "HEARTBEAT_SECONDS", 0.02)  # which names the version, however old
    new, old = host.start("new"), host.start("old")
    for address, versions in ((new, (3, 4)), (old, (1, 2))):
        writer = WeightPublisher(address, "policy")
        for update in versions:
            writer.publish(*stamped(1, update))
        writer.close()
    got: list[Version] = []
    reader = WeightSubscriber((new, old), "policy", lambda manifest, buffer: got.append(manifest.version))
    reader.start()
    assert reader.wait(V(1, 4), 30) == V(1, 4)
    host.stop("new")
    writer = WeightPublisher(old, "policy")
    while reader.status.address != old:
        time.sleep(0.02)
    time.sleep(0.2)
    writer.publish(*stamped(1, 3))
    time.sleep(0.2)
    writer.publish(*stamped(1, 5))
    assert reader.wait(V(1, 5), 30) == V(1, 5)
    assert got == [V(1, 4), V(1, 5)]
    writer.close()
    reader.close()


def test_a_relay_without_its_root_stops_at_once(folder: Path) -> None:
    settings = {"shared_folder": folder / "shm", "upstream": f"unix:{folder}/nobody.sock", "drain_seconds": 0.2}
    with process(f"unix:{folder}/near.sock", **settings) as child:
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=8) == 0  # less than the deadline of its call to the root
    assert not list((folder / "shm").iterdir())
