"""The service over a real socket: turns, ends, options, keep-alives, bad input."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dvla.v1 import common_pb2, sim_pb2

from services.common.errors import DvlaError, Exhausted, InvalidInput, NotFound, Unavailable, Unsupported
from services.common.spec import Array
from services.sim.client import SimClient, SimSession, reset_slot, zeros
from services.sim.env import ProcessEnv
from services.sim.scripted import Script, ScriptedSim
from services.sim.toy import ToySim
from tests.sim import trouble
from tests.sim.serving import Service, serving

Toy = tuple[Service, SimClient]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    factory = partial(ToySim, 4, observation="rgb+state", image_size=16)
    with serving(tmp_path_factory.mktemp("toy"), factory) as both:
        yield both


def begin(client: SimClient, session: SimSession, *slots: int) -> dict[str, Array]:
    start = client.make_start("reach", 5)
    _, arrays = session.advance([reset_slot(slot, "reach", start) for slot in slots])
    return arrays


def test_describe_tells_the_whole_contract(toy: Toy) -> None:
    _, client = toy
    spec, reply = client.describe()
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in spec.observation} == {
        "state": ("float32", (4,)),
        "rgb/top": ("uint8", (16, 16, 3)),
    }
    assert spec.task("reach").max_steps == 20
    assert (spec.starts, spec.action.dim, spec.action.bounded) == ("state", 2, True)
    assert (reply.slots_per_session, reply.max_sessions) == (4, 2)


def test_a_turn_resets_some_slots_and_advances_others(toy: Toy) -> None:
    _, client = toy
    with client.open() as session:
        first = begin(client, session, 0, 1)
        assert first["obs/state"].shape == (2, 4)
        assert first["obs/rgb/top"].dtype == np.uint8
        start = client.make_start("reach", 6)
        reply, arrays = session.advance([reset_slot(3, "reach", start)], [1, 0], np.full((2, 5, 2), 0.1, np.float32))
        assert list(reply.observed) == [0, 1, 2]
        assert [outcome.executed for outcome in reply.outcomes] == [5, 5]
        assert arrays["obs/state"][0].tobytes() == start
        assert np.allclose(arrays["obs/state"][1], arrays["obs/state"][2])
        assert arrays["reward"].shape == arrays["success"].shape == (2, 5)
        assert np.allclose(arrays["executed_action"], 0.1)


def test_only_wanted_tensors_travel(toy: Toy) -> None:
    _, client = toy
    with client.open(observation=["state"]) as session:
        assert set(begin(client, session, 0)) == {"obs/state"}
    with pytest.raises(InvalidInput, match=r"\['depth'\] do not exist; there are \['rgb/top', 'state'\]"):
        client.open(observation=["depth"])


@pytest.mark.parametrize(
    ("asked", "observed"),
    [
        (sim_pb2.FINAL_OBSERVATION_UNSPECIFIED, [1]),
        (sim_pb2.FINAL_OBSERVATION_NONE, []),
        (sim_pb2.FINAL_OBSERVATION_TRUNCATED, [1]),
        (sim_pb2.FINAL_OBSERVATION_ALL, [0, 1]),
    ],
)
def test_ended_episodes_are_observed_only_where_asked(tmp_path: Path, asked: int, observed: list[int]) -> None:
    with serving(tmp_path, partial(ScriptedSim, [Script(success_at=2), Script()], 4)) as (_, client):
        start = client.make_start("script", 0)
        with client.open(final_observation=asked) as session:
            session.advance([reset_slot(slot, "script", start) for slot in (0, 1)])
            reply, arrays = session.advance(slots=[0, 1], actions=np.zeros((2, 4, 2), np.float32))
        ends = [(outcome.terminated, outcome.truncated, outcome.step) for outcome in reply.outcomes]
        assert ends == [(True, False, 2), (False, True, 4)]
        assert list(reply.observed) == observed
        assert len(arrays["obs/state"]) == len(observed)
        assert (arrays["obs/state"][-1:, 2] == 4).all()


def test_recordings_hold_one_frame_per_step_of_slot_0(toy: Toy) -> None:
    _, client = toy
    start = client.make_start("reach", 5)
    with client.open(record=True) as session:
        reply, _ = session.advance([reset_slot(slot, "reach", start) for slot in (0, 1)])
        assert len(reply.frames) == 1
        reply, _ = session.advance(slots=[0, 1], actions=np.zeros((2, 3, 2), np.float32))
        assert len(reply.frames) == 3
        assert all(frame.startswith(b"\xff\xd8") for frame in reply.frames), "JPEG"
        reply, _ = session.advance(slots=[1], actions=np.zeros((1, 3, 2), np.float32))
        assert not reply.frames


def test_large_turns_travel_in_frames(tmp_path: Path) -> None:
    with serving(tmp_path, partial(ToySim, 64, observation="rgb", image_size=256), sessions=1) as (_, client):
        start = client.make_start("reach", 1)
        with client.open() as session:
            reply, arrays = session.advance([reset_slot(slot, "reach", start) for slot in range(64)])
            assert reply.payload.frames == 12
            assert arrays["obs/rgb/top"].shape == (64, 256, 256, 3)
            assert (arrays["obs/rgb/top"] == arrays["obs/rgb/top"][0]).all()
            long = np.zeros((64, 1000, 2), np.float32)
            reply, _ = session.advance(slots=range(64), actions=long)  # 512 kB of actions
            assert [outcome.executed for outcome in reply.outcomes] == [20] * 64


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"slots": [0], "actions": np.zeros((1, 1, 3), np.float32)}, InvalidInput, "expected"),
        ({"slots": [0], "actions": np.zeros((1, 1, 2), np.float64)}, InvalidInput, "float64, expected float32"),
        ({"slots": [0], "actions": np.full((1, 1, 2), np.inf, np.float32)}, InvalidInput, "not finite"),
        ({"slots": [9], "actions": np.zeros((1, 1, 2), np.float32)}, InvalidInput, "out of range"),
        ({"slots": [0]}, InvalidInput, "expected inline or frames"),
        ({}, InvalidInput, "at least one slot"),
        ({"resets": [reset_slot(0, "nope", b"x")]}, NotFound, "unknown task 'nope'"),
        ({"resets": [reset_slot(0, "reach", b"short")]}, InvalidInput, "16 bytes"),
        ({"resets": [reset_slot(0, "reach", b"\x00\x00\xc0\x7f" * 4)]}, InvalidInput, "outside"),
        (
            {"resets": [reset_slot(0, "reach", b"x")], "slots": [0], "actions": np.zeros((1, 1, 2), np.float32)},
            InvalidInput,
            "both reset and advanced",
        ),
    ],
)
def test_bad_turns_are_refused_with_names(
    toy: Toy, change: dict[str, object], kind: type[DvlaError], message: str
) -> None:
    _, client = toy
    session = client.open()
    begin(client, session, 0)
    with pytest.raises(kind, match=message):
        session.advance(**change)  # type: ignore[arg-type]
    session.close()
    with client.open() as after:
        begin(client, after, 0)


def test_bad_start_requests_are_refused(toy: Toy) -> None:
    _, client = toy
    with pytest.raises(NotFound, match="this simulator offers reach"):
        client.make_start("nope", 0)
    with pytest.raises(InvalidInput, match="too large"):
        client.make_start("reach", 2**32)


def test_a_session_must_begin_with_open_and_take_turns(toy: Toy) -> None:
    _, client = toy
    session = client.open()
    session._requests.put(sim_pb2.SessionRequest(open=sim_pb2.OpenSession()))
    with pytest.raises(InvalidInput, match="message open is not expected"):
        session.ping(1)
    session.close()
    stream = client._stub.Session(iter([sim_pb2.SessionRequest(ping=sim_pb2.Ping())]))
    with pytest.raises(Exception, match="expected open"):
        next(stream)


def test_a_transport_that_is_not_offered_is_refused_with_the_reason(toy: Toy) -> None:
    _, client = toy
    with pytest.raises(Unsupported, match="no cuda_ipc: not offered by this side; this side offers shm, grpc"):
        client.open(locality=common_pb2.Locality(transports=[common_pb2.TRANSPORT_CUDA_IPC]))


def test_full_means_resource_exhausted_and_ends_free_the_slots(toy: Toy) -> None:
    service, client = toy
    first, second = client.open(), client.open()
    with pytest.raises(Exhausted, match="all 2 sessions are taken"):
        client.open()
    first.close()
    assert service.host.open_sessions == 1
    third = client.open()
    for session in (second, third):
        session.close()
    assert service.host.open_sessions == 0


def test_pings_are_answered(toy: Toy) -> None:
    _, client = toy
    with client.open() as session:
        assert session.ping(41) == 41


def test_a_silent_client_loses_its_session(tmp_path: Path) -> None:
    with serving(tmp_path, partial(ToySim, 1), silence=0.3) as (service, client):
        session = client.open()
        end = time.monotonic() + 10
        while service.host.open_sessions and time.monotonic() < end:
            time.sleep(0.02)
        assert service.host.open_sessions == 0
        with pytest.raises(Unavailable, match="silent for 0 s"):
            session.ping(1)


def test_draining_ends_sessions_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, partial(ToySim, 1)) as (service, client):
        session = client.open()
        begin(client, session, 0)
        service.call(service.servicer.drain)
        with pytest.raises(Unavailable, match="shutting down"):
            session._receive()


def test_s30_a_dead_environment_ends_its_session_with_a_reason(tmp_path: Path) -> None:
    with serving(tmp_path, trouble.small, sessions=1, processes=1) as (_, client):
        session = client.open()
        begin(client, session, 0, 1)
        with pytest.raises(Unavailable, match=r"died|lost"):
            session.advance(slots=[0, 1], actions=np.full((2, 1, 2), trouble.DIE, np.float32))
        session.close()
        end = time.monotonic() + 120
        while True:
            try:
                with client.open() as again:
                    begin(client, again, 0, 1)
                    reply, _ = again.advance(slots=[0], actions=zeros(client.describe()[0], 1))
                    assert reply.outcomes[0].executed == 1
                return
            except Unavailable:
                assert time.monotonic() < end
                time.sleep(0.05)


def test_s30_a_death_is_told_to_idle_sessions_too_also_to_later_ones(tmp_path: Path) -> None:
    with serving(tmp_path, trouble.small, sessions=1, processes=1) as (service, client):
        for _ in range(2):
            with client.open() as session:
                begin(client, session, 0)
        session = client.open()
        (env,) = service.host.envs
        assert isinstance(env, ProcessEnv)
        os.kill(env.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="died: signal 9"):
            session._receive()


def test_counters_tell_what_happened(tmp_path: Path) -> None:
    with serving(tmp_path, partial(ScriptedSim, [Script(success_at=3), Script()], 9)) as (service, client):
        start = client.make_start("script", 0)
        with client.open() as session:
            session.advance([reset_slot(slot, "script", start) for slot in (0, 1)])
            session.advance(slots=[0, 1], actions=np.zeros((2, 5, 2), np.float32))
        counted = service.telemetry.metrics()
    expected = {"starts_made": 1, "turns": 2, "episodes_started": 2, "env_steps": 8, "episodes_ended": 1}
    assert counted == expected | {"sessions_grpc": 1}
