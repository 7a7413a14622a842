"""Observations in shared memory: equal to those by grpc, chosen by probe, given back by the living and the dead."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dvla.v1 import common_pb2, sim_pb2

from services.common.arena import Arena, orphans
from services.common.arena.ring import RingReader
from services.common.errors import ConfigError, InvalidInput, Unavailable, Unsupported
from services.common.locality import GRPC, SHM, Vicinity
from services.common.security import Security
from services.common.spec import Array
from services.common.wire import spec_to_proto
from services.rollout.worker.client_sim import SimClient as WorkerClient
from services.rollout.worker.turn import Reset
from services.sim.client import SimClient, SimSession, reset_slot
from services.sim.env import ProcessEnv
from services.sim.sharing import SPARE, Sharing
from services.sim.toy import ToySim
from tests.sim import trouble
from tests.sim.serving import Service, serving

Toy = tuple[Service, SimClient, SimClient]
IMAGES = partial(ToySim, 4, observation="rgb+state", image_size=64)


@pytest.fixture(scope="module", params=[0, 1], ids=["thread", "process"])
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    """A service, a client by grpc and one by shared memory."""
    folder = tmp_path_factory.mktemp("toy")
    with serving(folder, IMAGES, processes=request.param) as (service, client):
        sharing = SimClient(service.address, transport="auto", shared_folder=str(folder))
        yield service, client, sharing
        sharing.close()


def turns(client: SimClient) -> Iterator[tuple[sim_pb2.Advanced, dict[str, Array]]]:
    with client.open() as session:
        yield session.advance([reset_slot(slot, "reach", client.make_start("reach", slot)) for slot in range(3)])
        start, actions = client.make_start("reach", 9), np.full((2, 5, 2), 0.2, np.float32)
        for _ in range(3):
            yield session.advance([reset_slot(3, "reach", start)], [2, 0], actions)


def test_turns_are_the_same_by_every_transport(toy: Toy) -> None:
    _, plain, sharing = toy
    places = []
    for (left, sent), (right, shared) in zip(turns(plain), turns(sharing), strict=True):
        assert sent.keys() == shared.keys()
        for name, array in sent.items():
            assert array.tobytes() == shared[name].tobytes(), name
        assert list(left.observed) == list(right.observed)
        assert left.payload.WhichOneof("location") == "inline"
        assert right.payload.WhichOneof("location") == "shm"
        assert left.payload.length == right.payload.length
        places.append(right.payload.shm.offset)
    assert places == [places[0], places[1]] * 2, "turns alternate between two halves"


def test_the_choice_is_told_with_its_reason(toy: Toy) -> None:
    service, plain, sharing = toy
    with sharing.open() as shared, plain.open() as sent:
        assert shared.opened.transport == SHM
        assert "probe" in shared.opened.reason
        assert (sent.opened.transport, sent.opened.reason) == (GRPC, "asked for")
    assert service.telemetry.metrics()["sessions_shm"] >= 1
    assert service.sharing.facts().startswith("sim-")


def test_a_turn_that_is_too_long_for_its_half_comes_in_the_message(toy: Toy) -> None:
    _, _, sharing = toy
    with sharing.open() as session:
        session.advance([reset_slot(slot, "reach", sharing.make_start("reach", slot)) for slot in range(4)])
        reply, arrays = session.advance(slots=range(4), actions=np.zeros((4, 1000, 2), np.float32))
        assert reply.payload.WhichOneof("location") == "inline"
        assert arrays["reward"].shape == (4, 1000)
        reply, _ = session.advance([reset_slot(0, "reach", sharing.make_start("reach", 1))])
        assert reply.payload.WhichOneof("location") == "shm"


def changed(**change: object) -> Callable[[common_pb2.Locality], common_pb2.Locality]:
    def apply(locality: common_pb2.Locality) -> common_pb2.Locality:
        for name, value in change.items():
            setattr(locality, name, value)
        return locality

    return apply


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(boot_id="another"), "other boot id"),
        (changed(probe_file="absent"), "another view of shared memory"),
        (changed(probe_file="../secret"), "plain file name"),
        (changed(probe_file=""), "no shared-memory folder"),
        (changed(probe_nonce=b"guess"), "another nonce"),
    ],
)
def test_a_client_elsewhere_gets_grpc_unless_it_insists(
    toy: Toy, change: Callable[[common_pb2.Locality], common_pb2.Locality], reason: str
) -> None:
    service, plain, _ = toy
    vicinity = Vicinity("auto", str(service.sharing._folder))
    with plain.open(locality=change(vicinity.locality())) as session:
        assert session.opened.transport == GRPC
        assert reason in session.opened.reason
    with pytest.raises(Unsupported, match=reason):
        plain.open(locality=change(vicinity.locality(GRPC)))
    vicinity.close()


def test_a_service_can_be_told_which_transport_to_use(tmp_path: Path) -> None:
    with serving(tmp_path, IMAGES, transport="grpc") as (service, plain):
        with pytest.raises(Unsupported, match="no shm: not offered by this side; this side offers grpc"):
            SimClient(service.address, transport="shm", shared_folder=str(tmp_path)).open()
        plain.open().close()
    refusal = pytest.raises(Unsupported, match="no grpc: not offered by this side; this side offers shm")
    with serving(tmp_path, IMAGES, transport="shm") as (_, plain), refusal:
        plain.open()


def test_impossible_settings_are_refused_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="host memory"):
        Sharing("cuda_ipc", str(tmp_path), 2)
    with pytest.raises(ConfigError, match="expected one of auto, cuda_ipc, shm, grpc"):
        Sharing("carrier pigeon", str(tmp_path), 2)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        Sharing("auto", str(tmp_path / "file"), 2)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    described = sim_pb2.DescribeResponse(slots_per_session=4, spec=spec_to_proto(IMAGES().spec))
    with pytest.raises(ConfigError, match="shm_size"):
        Sharing("shm", str(tmp_path), 2).prepare(described)
    lenient = Sharing("auto", str(tmp_path), 2)
    lenient.prepare(described)
    assert "shm_size" in lenient.choose(common_pb2.Locality(transports=[SHM, GRPC])).reason


def no_space(fd: int, offset: int, length: int) -> None:
    raise OSError(28, "No space left on device")


def test_frozen_clients_keep_their_rings_and_later_ones_use_grpc(tmp_path: Path) -> None:
    with serving(tmp_path, IMAGES, sessions=1) as (service, _):
        client = SimClient(service.address, transport="auto", shared_folder=str(tmp_path))
        frozen = list[RingReader]()
        for _ in range(1 + SPARE):
            session = client.open()
            assert session._ring is not None
            frozen.append(session._ring)
            session._ring = None  # so that closing the session does not let go
            session.close()
        with client.open() as session:
            assert session.opened.transport == GRPC
            assert "has no run of" in session.opened.reason
        frozen[1].close()
        with client.open() as session:
            assert session.opened.transport == SHM
        client.close()


def test_s30_a_killed_environment_gives_its_ring_back(tmp_path: Path) -> None:
    with serving(tmp_path, trouble.small, sessions=1, processes=1) as (service, _):
        client = SimClient(service.address, transport="shm", shared_folder=str(tmp_path))
        session = client.open()
        (env,) = service.host.envs
        assert isinstance(env, ProcessEnv)
        os.kill(env.pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            session._receive()
        session.close()
        opened(client).close()
        arena = service.sharing._arena
        assert arena is not None
        arena.collect()
        assert len(arena.extents()) <= 1
        client.close()


def opened(client: SimClient) -> SimSession:
    end = time.monotonic() + 60
    while True:
        try:
            return client.open()
        except Unavailable:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_arenas_and_probes_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = Arena.create(tmp_path, "sim", 1000)
    dead.close()
    (tmp_path / "dead.probe").write_bytes(b"x" * 16)
    with serving(tmp_path, IMAGES) as (service, _):
        client = SimClient(service.address, transport="shm", shared_folder=str(tmp_path))
        client.open().close()
        assert len(list(tmp_path.glob("*.arena"))) == len(list(tmp_path.glob("*.probe"))) == 1
        client.close()
    assert list(orphans(tmp_path, "sim")) == []
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.suffix != ".sock") == []


async def test_the_workers_client_shares_and_falls_back(toy: Toy, tmp_path: Path) -> None:
    service, plain, _ = toy
    start = plain.make_start("reach", 3)
    seen = []
    for setting, folder, transport in (
        ("shm", service.sharing._folder, "shm: same machine"),
        ("auto", tmp_path, "grpc: no shm: the peer has another view"),
        ("grpc", None, "grpc: asked for"),
    ):
        vicinity = Vicinity(setting, str(folder or ""))
        client = WorkerClient(service.address, Security(), vicinity)
        session = await client.open("w", (), final_observation=False)
        assert session.transport.startswith(transport)
        turn = await session.advance([Reset(0, "reach", start, 0, True)], (), None)
        seen.append(turn.started[0]["rgb/top"].tobytes())
        await session.close()
        await client.close()
        vicinity.close()
    assert len(set(seen)) == 1


async def test_a_client_that_cannot_see_what_was_promised_asks_again(toy: Toy, tmp_path: Path) -> None:
    """The simulator read our probe, but its arena is not where we look: the other direction fails."""
    service, _, _ = toy
    for setting in ("auto", "shm"):
        vicinity = Vicinity(setting, str(service.sharing._folder))
        assert vicinity.peer is not None
        vicinity.peer._folder = tmp_path
        client = WorkerClient(service.address, Security(), vicinity)
        if setting == "auto":
            session = await client.open("w", (), final_observation=False)
            assert session.transport.startswith("grpc: asked for; no shm")
            await session.close()
        else:
            with pytest.raises(Unsupported, match="cannot be opened"):
                await client.open("w", (), final_observation=False)
        await client.close()
        vicinity.close()


def test_a_reader_takes_nothing_outside_of_its_ring(tmp_path: Path) -> None:
    with Arena.create(tmp_path, "sim", 4096) as arena:
        extent, other = arena.allocate(1024), arena.allocate(64)
        arena.view(extent)[:4] = list(b"nice")
        vicinity = Vicinity("shm", str(tmp_path))
        assert vicinity.peer is not None
        with pytest.raises(InvalidInput, match="nonce"):
            RingReader(vicinity.peer, extent.message(), b"evil")
        reader = RingReader(vicinity.peer, extent.message(), b"nice")
        for change in (
            {"offset": other.offset},
            {"offset": extent.offset - 64},
            {"offset": extent.offset + 1024},
            {"length": 65},
            {"generation": other.generation},
            {"arena": "other"},
        ):
            fields = {"arena": extent.arena, "offset": extent.offset, "length": 64, "generation": extent.generation}
            message = common_pb2.Extent(**(fields | change))  # type: ignore[arg-type]
            with pytest.raises(InvalidInput, match="no part of this session"):
                reader.arrays(common_pb2.Payload(length=64, shm=message))
        reader.close()
        vicinity.close()
