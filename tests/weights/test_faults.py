"""Processes killed or frozen in the middle of things, connections cut: what is readable is always whole."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from services.common import client_subscribe
from services.common.bundle import Manifest, Version
from services.common.errors import DvlaError
from services.common.weights_client import WeightPublisher, WeightSubscriber, fetch_once
from tests.weights.hosting import ROOT, Host, check_stamp, process, stamped

V = Version
SIZE = 40_000  # rows of 200 bytes: 8 MB, so that a publish takes long enough to be hit
PUBLISHING = Path(__file__).with_name("publishing.py")


def test_a_server_killed_while_publishing_comes_back_with_a_whole_version(folder: Path) -> None:
    address = f"unix:{folder}/w.sock"
    settings = {"shared_folder": folder / "shm", "durable_folder": folder / "disk"}
    rng = random.Random(28)
    got: list[Version] = []

    def receive(manifest: Manifest, buffer: Any) -> None:
        check_stamp(manifest, buffer)
        got.append(manifest.version)

    reader = WeightSubscriber(address, "policy", receive, folder=str(folder / "shm"))
    reader.start()
    sealed = None
    for epoch in range(1, 5):
        writer = WeightPublisher(address, "policy", folder=str(folder / ("shm" if epoch % 2 else "apart")), patience=0)
        with process(address, **settings) as server:
            if sealed is not None:
                manifest, buffer = fetch_once(address, "policy")
                check_stamp(manifest, buffer)
                assert manifest.version >= sealed
            threading.Timer(rng.uniform(0.2, 0.6), server.kill).start()
            with suppress(DvlaError):
                for update in range(10_000):
                    sealed = writer.publish(*stamped(epoch, update, size=SIZE))
            server.wait(10)
        writer.close()
    with process(address, **settings):
        manifest, buffer = fetch_once(address, "policy")
        check_stamp(manifest, buffer)
        assert sealed is not None
        assert manifest.version >= sealed
        # It may have seen one that was readable but not stored yet, and never goes back.
        assert (reader.wait(manifest.version, 30) or manifest.version) >= manifest.version
        left = {path.suffix for path in (folder / "disk" / "policy").iterdir()}
        assert left <= {".safetensors", ""}
        assert all(path.name.startswith(("weights", "publish")) for path in (folder / "shm").iterdir())
    reader.close()
    assert got == sorted(set(got))


def test_a_learner_killed_while_publishing_leaves_a_whole_version(host: Host, folder: Path) -> None:
    address = host.start(max_files=3)
    rng = random.Random(28)
    newest = V(0, 0)
    for epoch in range(1, 6):
        place = str(folder / ("shm" if epoch % 2 else "apart"))
        command = [sys.executable, str(PUBLISHING), address, str(epoch), place]
        path = os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"fenced\n"
            time.sleep(rng.uniform(0.05, 0.4))
        finally:
            child.kill()
            child.communicate()
        with suppress(DvlaError):  # killed before its first version was sealed
            manifest, buffer = fetch_once(address, "policy", folder=str(folder / "shm"))
            check_stamp(manifest, buffer)
            assert manifest.version >= newest
            newest = manifest.version
    writer = WeightPublisher(address, "policy", folder=str(folder / "shm"))
    assert writer.publish(*stamped(9, 0, size=SIZE)) == V(9, 0)  # no file is lost to the dead
    assert newest > V(0, 0)
    writer.close()


class Cutter:
    """A Unix-socket proxy that cuts the first connections after some bytes from the server."""

    def __init__(self, path: Path, target: str, cuts: list[int]) -> None:
        self.cut = 0
        self._target, self._cuts = target.removeprefix("unix:"), cuts
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            limit = self._cuts.pop(0) if self._cuts else 2**60
            threading.Thread(target=self._pump, args=(client, server, 2**60), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, limit), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, limit: int) -> None:
        with suppress(OSError):
            while limit > 0 and (data := source.recv(65536)):
                target.sendall(data[:limit])
                limit -= len(data)
            self.cut += limit <= 0
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


def test_a_cut_connection_is_resumed_where_it_broke(host: Host, folder: Path) -> None:
    address = host.start()
    writer = WeightPublisher(address, "policy")
    writer.publish(*stamped(1, 0, size=4 * SIZE))  # 32 MB
    cutter = Cutter(folder / "cut.sock", address, [10_000_000, 12_000_000])
    check_stamp(*fetch_once(f"unix:{folder}/cut.sock", "policy"))
    assert cutter.cut == 2
    assert host.server().telemetry.metrics()["fetches/resumed"] == 2
    cutter.close()
    writer.close()


def test_a_publish_over_a_cut_connection_is_sent_again(host: Host, folder: Path) -> None:
    address = host.start()
    cutter = Cutter(folder / "cut.sock", address, [100])
    writer = WeightPublisher(f"unix:{folder}/cut.sock", "policy", folder=str(folder / "apart"))
    assert writer.publish(*stamped(1, 0, size=SIZE)) == V(1, 0)
    assert cutter.cut == 1
    check_stamp(*fetch_once(address, "policy"))
    cutter.close()
    writer.close()


def test_a_frozen_server_is_left_for_the_next_and_closing_does_not_hang(
    host: Host, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_subscribe, "WATCH_SECONDS", 1.0)
    monkeypatch.setattr(client_subscribe, "CONNECT_SECONDS", 1.0)
    root, frozen = host.start(), f"unix:{folder}/frozen.sock"
    settings = {"shared_folder": folder / "shm", "durable_folder": folder / "frozen"}
    with process(frozen, **settings) as server:
        first = WeightPublisher(frozen, "policy")
        first.publish(*stamped(1, 0))
        first.close()
        reader = WeightSubscriber((frozen, root), "policy", check_stamp)
        reader.start()
        assert reader.wait(V(1, 0), 20) == V(1, 0)
        server.send_signal(signal.SIGSTOP)
        writer = WeightPublisher(root, "policy")
        writer.publish(*stamped(1, 1))
        assert reader.wait(V(1, 1), 30) == V(1, 1)
        writer.close()
        reader.close()
        stuck = WeightSubscriber(frozen, "policy", check_stamp)
        stuck.start()
        stuck.close(seconds=20)
        assert not stuck.running
