"""The client of a simulator against small servicers of our own, over real gRPC with and without a token."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dvla.v1 import common_pb2, sim_pb2, sim_pb2_grpc

from services.common import codec
from services.common.config import RoleConfig
from services.common.errors import DvlaError, Exhausted, InvalidInput, NotFound, Unavailable
from services.common.server import RoleServer
from services.common.spec import Array, SimSpec, TensorSpec
from services.common.telemetry import Telemetry
from services.common.wire import spec_to_proto
from services.rollout.worker import client_sim
from services.rollout.worker.client_sim import Session, SimClient
from services.rollout.worker.turn import Reset
from tests.rollout.worker.fakes import SPEC

Requests = AsyncIterator[sim_pb2.SessionRequest]
Replies = AsyncIterator[sim_pb2.SessionResponse]
Behaviour = Callable[[Requests], Replies]
PIXELS = (700, 700, 3)  # with two rows more than two frames
WIDE = replace(SPEC, observation=(*SPEC.observation, TensorSpec("rgb/base", "uint8", PIXELS)))


class Servicer(sim_pb2_grpc.SimServiceServicer):
    """Plays a session as its behaviour says."""

    def __init__(self, session: Behaviour, spec: SimSpec = SPEC) -> None:
        self.session, self.spec = session, spec
        self.full = 0
        self.opened: list[sim_pb2.OpenSession] = []

    async def Describe(self, request: sim_pb2.DescribeRequest, context: Any) -> sim_pb2.DescribeResponse:
        return sim_pb2.DescribeResponse(spec=spec_to_proto(self.spec), slots_per_session=4)

    async def MakeStart(self, request: sim_pb2.MakeStartRequest, context: Any) -> sim_pb2.MakeStartResponse:
        if self.full:
            self.full -= 1
            raise Exhausted("no environment is free")
        if request.task != "reach":
            raise NotFound("unknown task")
        return sim_pb2.MakeStartResponse(state=f"{request.task}/{request.seed}".encode())

    async def Session(self, request_iterator: Requests, context: Any) -> Replies:
        first = await anext(request_iterator)
        self.opened.append(first.open)
        async for reply in self.session(request_iterator):
            yield reply


OPENED = sim_pb2.SessionResponse(
    opened=sim_pb2.SessionOpened(slots=4, transport=common_pb2.TRANSPORT_GRPC, reason="asked for")
)


@pytest.fixture(params=["", "s3cret"], ids=["open", "token"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> RoleConfig:
    (tmp_path / "token").write_text(request.param)
    return RoleConfig(
        listen=f"unix:{tmp_path}/s", token_file=str(tmp_path / "token") if request.param else "", drain_seconds=0
    )


@asynccontextmanager
async def simulator(config: RoleConfig, servicer: Servicer) -> AsyncIterator[SimClient]:
    server = RoleServer(config, Telemetry("sim", "s"))
    sim_pb2_grpc.add_SimServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    client = SimClient(config.listen, config.security())
    yield client
    await client.close()
    await server.stop()


@asynccontextmanager
async def session(config: RoleConfig, behaviour: Behaviour, spec: SimSpec = SPEC) -> AsyncIterator[Session]:
    async with simulator(config, Servicer(behaviour, spec)) as client:
        opened = await client.open("w", (), final_observation=False)
        yield opened
        await opened.close()


# A well-behaved simulator -------------------------------------------------------------------------------------


async def polite(requests: Requests, spec: SimSpec = SPEC, log: list[Any] | None = None) -> Replies:
    """Answers pings and turns; rewards are the first action, observations the row number."""
    yield OPENED
    advance: sim_pb2.Advance | None = None
    assembler: codec.Assembler | None = None
    async for request in requests:
        kind = request.WhichOneof("message")
        if kind == "ping":
            yield sim_pb2.SessionResponse(pong=sim_pb2.Pong(nonce=request.ping.nonce))
            continue
        if kind == "advance":
            advance, assembler = request.advance, None
            if advance.actions.WhichOneof("location") == "frames":
                assembler = codec.Assembler(advance.actions, 1 << 30)
                continue
        elif assembler is None or not assembler.add(request.frame):
            continue
        assert advance is not None
        if log is not None:
            log.append(advance)
        async for reply in answer(advance, assembler.buffer if assembler else None, spec):
            yield reply


async def answer(advance: sim_pb2.Advance, data: memoryview | None, spec: SimSpec) -> Replies:
    rows, n = len(advance.reset) + len(advance.slots), len(advance.slots)
    arrays: dict[str, Array] = {
        f"obs/{t.name}": np.broadcast_to(np.arange(rows).reshape(-1, *[1] * len(t.shape)), (rows, *t.shape)).astype(
            t.dtype
        )
        for t in spec.observation
    }
    length = 0
    if n:
        action = codec.decode(advance.actions, data)["action"]
        length = action.shape[1]
        arrays["reward"] = action[:, :, 0]
        arrays["success"] = np.zeros(action.shape[:2], np.bool_)
        arrays["executed_action"] = np.clip(action, -1, 1)
    payload, rest = codec.encode(arrays)
    outcomes = [sim_pb2.SlotOutcome(executed=length) for _ in range(n)]
    yield sim_pb2.SessionResponse(advanced=sim_pb2.Advanced(payload=payload, observed=range(rows), outcomes=outcomes))
    for frame in codec.frames(rest):
        yield sim_pb2.SessionResponse(frame=frame)


def resets(*slots: int) -> list[Reset]:
    return [Reset(slot, "reach", b"start", 7 + slot, slot % 2 == 0) for slot in slots]


async def test_spec_and_starts_come_over(config: RoleConfig) -> None:
    servicer = Servicer(polite)
    async with simulator(config, servicer) as client:
        assert await client.describe() == (SPEC, 4)
        servicer.full = 1  # asked again until there is room
        assert await client.make_start("reach", 2**32 - 1) == b"reach/4294967295"
        with pytest.raises(NotFound, match=r"simulator unix:.*: unknown task"):
            await client.make_start("juggle", 1)


async def test_turns_go_back_and_forth(config: RoleConfig) -> None:
    log: list[sim_pb2.Advance] = []
    servicer = Servicer(lambda requests: polite(requests, log=log))
    async with simulator(config, servicer) as client:
        opened = await client.open("worker-1", ("state",), final_observation=True)
        assert (opened.slots, opened.transport) == (4, "grpc: asked for")
        first = await opened.advance(resets(2, 0), [], None)
        assert {slot: row["state"][0] for slot, row in first.started.items()} == {2: 0, 0: 1}
        assert first.outcomes == {}
        actions = np.array([[[0.5, 3.0]] * 3, [[-0.25, 0.0]] * 3], np.float32)
        second = await opened.advance(resets(1), [2, 0], actions)
        assert second.started[1]["state"][0] == 0
        assert second.outcomes[2].reward.tolist() == [0.5] * 3
        assert second.outcomes[0].reward.tolist() == [-0.25] * 3
        assert second.outcomes[2].executed_action.max() == 1.0
        assert second.outcomes[0].observation is not None
        assert second.outcomes[0].observation["state"][0] == 2
        await opened.close()
    [request] = servicer.opened
    assert (request.client, list(request.observation), request.final_observation) == (
        "worker-1",
        ["state"],
        sim_pb2.FINAL_OBSERVATION_TRUNCATED,
    )
    assert list(request.locality.transports) == [common_pb2.TRANSPORT_GRPC]
    assert request.locality.boot_id
    reset = log[1].reset[0]
    assert (reset.slot, reset.task, reset.start, reset.seed, reset.end_on_success) == (1, "reach", b"start", 8, False)
    assert log[0].reset[0].end_on_success


async def test_bulk_travels_in_frames_both_ways(config: RoleConfig) -> None:
    async with session(config, lambda requests: polite(requests, WIDE), WIDE) as opened:
        actions = np.random.default_rng(0).normal(size=(2, 200_000, 2)).astype(np.float32)  # 3.2 MB
        turn = await opened.advance([], [3, 1], actions)
        np.testing.assert_array_equal(turn.outcomes[3].reward, actions[0, :, 0])
        np.testing.assert_array_equal(turn.outcomes[1].reward, actions[1, :, 0])
        for row, slot in enumerate((3, 1)):
            observation = turn.outcomes[slot].observation
            assert observation is not None
            assert observation["rgb/base"].shape == PIXELS
            assert (observation["rgb/base"] == row).all()


async def test_keep_alives_pass_between_the_frames_of_a_turn(
    config: RoleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_sim, "PING_SECONDS", 0.001)
    pings = 0

    async def counted(requests: Requests) -> AsyncIterator[sim_pb2.SessionRequest]:
        nonlocal pings
        async for request in requests:
            pings += request.WhichOneof("message") == "ping"
            yield request

    async with session(config, lambda requests: polite(counted(requests), WIDE), WIDE) as opened:
        actions = np.zeros((1, 400_000, 2), np.float32)
        for _ in range(5):
            turn = await opened.advance([], [0], actions)
            assert turn.outcomes[0].executed == 400_000
    assert pings > 5


# Others -------------------------------------------------------------------------------------------------------


async def test_a_full_simulator_is_told_apart(config: RoleConfig) -> None:
    async def full(requests: Requests) -> Replies:
        raise Exhausted("all 2 sessions are taken")
        yield

    async with simulator(config, Servicer(full)) as client:
        with pytest.raises(Exhausted, match="all 2 sessions are taken"):
            await client.open("w", (), final_observation=False)


async def test_an_absent_simulator_is_unavailable(tmp_path: Path) -> None:
    client = SimClient(f"unix:{tmp_path}/nobody", RoleConfig().security())
    for attempt in (client.describe(), client.make_start("reach", 1), client.open("w", (), final_observation=False)):
        with pytest.raises(Unavailable, match=r"simulator unix:.*nobody"):
            await attempt
    await client.close()


async def after_open(requests: Requests, *replies: sim_pb2.SessionResponse, error: Exception | None = None) -> Replies:
    """Opens, waits for the first turn, sends what is given, and ends or fails."""
    yield OPENED
    while (await anext(requests)).WhichOneof("message") != "advance":
        pass
    for reply in replies:
        yield reply
    if error:
        raise error


def bulk_header(frames: int = 3) -> sim_pb2.SessionResponse:
    payload = common_pb2.Payload(length=2 * codec.FRAME_BYTES + 64, frames=frames)
    return sim_pb2.SessionResponse(advanced=sim_pb2.Advanced(payload=payload))


def frame(offset: int, length: int = codec.FRAME_BYTES) -> sim_pb2.SessionResponse:
    return sim_pb2.SessionResponse(frame=common_pb2.Frame(offset=offset, data=bytes(length)))


@pytest.mark.parametrize(
    ("replies", "error", "expected", "message"),
    [
        ([], None, Unavailable, "closed the session"),
        ([], Unavailable("env-0 died"), Unavailable, "env-0 died"),
        ([], InvalidInput("slot 9 does not exist"), InvalidInput, "slot 9 does not exist"),
        ([], ZeroDivisionError("bug"), DvlaError, "ZeroDivisionError: bug"),
        ([bulk_header()], None, Unavailable, "closed the session"),
        ([bulk_header(), frame(0)], Unavailable("died halfway"), Unavailable, "died halfway"),
        ([bulk_header(), frame(codec.FRAME_BYTES)], None, InvalidInput, "expected 1 to"),
        ([bulk_header(), frame(0), frame(0)], None, InvalidInput, "expected 1 to"),
        ([bulk_header(), bulk_header()], None, InvalidInput, "sent advanced; expected frame"),
        ([bulk_header(frames=2)], None, InvalidInput, "announced in 2 frames"),
        ([frame(0)], None, InvalidInput, "sent frame; expected advanced"),
        ([OPENED], None, InvalidInput, "sent opened; expected advanced"),
        ([sim_pb2.SessionResponse()], None, InvalidInput, "sent None; expected advanced"),
        ([sim_pb2.SessionResponse(advanced=sim_pb2.Advanced())], None, InvalidInput, "no finite first observation"),
    ],
)
async def test_whatever_goes_wrong_in_a_turn_has_its_class_and_reason(
    config: RoleConfig,
    replies: list[sim_pb2.SessionResponse],
    error: Exception | None,
    expected: type[Exception],
    message: str,
) -> None:
    async with session(config, lambda requests: after_open(requests, *replies, error=error)) as opened:
        with pytest.raises(expected, match=message) as seen:
            await asyncio.wait_for(opened.advance(resets(0), [], None), 20)
        assert type(seen.value) is expected


async def test_a_turn_after_the_end_names_the_reason_of_the_end(config: RoleConfig) -> None:
    over = asyncio.Event()

    async def ends(requests: Requests) -> Replies:
        yield OPENED
        over.set()
        raise InvalidInput("you were too slow")

    async with session(config, ends) as opened:
        await over.wait()
        await asyncio.wait([opened._reader], timeout=10)
        opened._replies = asyncio.Queue()  # as if somebody had read it
        with pytest.raises(InvalidInput, match="you were too slow"):
            await opened.advance(resets(0), [], None)


async def test_a_simulator_that_answers_nothing_is_given_up(
    config: RoleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_sim, "CALL_SECONDS", 1.5)

    async def silent(requests: Requests) -> Replies:
        await asyncio.sleep(60)
        yield OPENED

    async with simulator(config, Servicer(silent)) as client:
        with pytest.raises(Unavailable, match="did not answer within"):
            await client.open("w", (), final_observation=False)


async def hears_nothing(requests: Requests) -> Replies:
    yield OPENED
    await asyncio.sleep(60)


async def hears_but_never_answers_turns(requests: Requests) -> Replies:
    yield OPENED
    async for request in requests:
        if request.WhichOneof("message") == "ping":
            yield sim_pb2.SessionResponse(pong=sim_pb2.Pong())


async def test_silence_ends_a_session_long_before_a_turn_may(
    config: RoleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_sim, "PING_SECONDS", 0.02)
    monkeypatch.setattr(client_sim, "SILENCE_SECONDS", 0.1)
    async with session(config, hears_nothing) as opened:
        with pytest.raises(Unavailable, match="was silent"):
            await asyncio.wait_for(opened.advance(resets(0), [], None), 20)


async def test_a_slow_turn_may_last_while_the_simulator_is_heard(
    config: RoleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_sim, "PING_SECONDS", 0.02)
    monkeypatch.setattr(client_sim, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(client_sim, "TURN_SECONDS", 2.5)
    async with session(config, hears_but_never_answers_turns) as opened:
        with pytest.raises(Unavailable, match="did not answer within 2 s"):
            await asyncio.wait_for(opened.advance(resets(0), [], None), 20)


async def test_a_simulator_that_takes_no_bytes_is_given_up(config: RoleConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async with session(config, hears_nothing) as opened:
        monkeypatch.setattr(client_sim, "CALL_SECONDS", 0.5)
        huge = np.zeros((1, 8_000_000, 2), np.float32)  # more than any window holds
        with pytest.raises(Unavailable, match="took no message"):
            await asyncio.wait_for(opened.advance([], [0], huge), 20)


async def test_closing_frees_the_simulator_at_once(config: RoleConfig) -> None:
    freed = asyncio.Event()

    async def held(requests: Requests) -> Replies:
        try:
            yield OPENED
            async for _ in requests:
                pass
        finally:
            freed.set()

    async with simulator(config, Servicer(held)) as client:
        opened = await client.open("w", (), final_observation=False)
        await opened.close()
        await asyncio.wait_for(freed.wait(), 10)
        before: set[asyncio.Task[Any]] = {opened._reader, opened._pinger}
        assert all(task.done() for task in before)
