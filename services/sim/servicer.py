"""The SimService: decodes, asks the host, encodes. One `_Conversation` per session stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio
import structlog
from dvla.v1 import common_pb2, sim_pb2, sim_pb2_grpc

from services.common import codec
from services.common.errors import DvlaError, Exhausted, InvalidInput, Unavailable
from services.common.frame_wire import encode_frame, encode_session
from services.common.interceptors import replace_handlers
from services.common.locality import SHM, Choice, name_of
from services.common.telemetry import Telemetry
from services.sim.chunks import FinalObservation
from services.sim.engine import RingPlace, SessionOptions
from services.sim.host import Host, HostedSession
from services.sim.sharing import Sharing

log = structlog.get_logger()

SILENCE_SECONDS = 15.0
ACTION_LIMIT = 64 * 1024 * 1024  # bytes of one turn's actions
SEEDS = 2**32  # numpy's RandomState, which simulators seed, takes no more

FINAL: dict[int, FinalObservation] = {
    sim_pb2.FINAL_OBSERVATION_UNSPECIFIED: "truncated",
    sim_pb2.FINAL_OBSERVATION_NONE: "none",
    sim_pb2.FINAL_OBSERVATION_TRUNCATED: "truncated",
    sim_pb2.FINAL_OBSERVATION_ALL: "all",
}

Context = grpc.aio.ServicerContext[Any, Any]


class SimServicer(sim_pb2_grpc.SimServiceServicer):
    """Serves a `Host`."""

    def __init__(
        self, host: Host, telemetry: Telemetry, sharing: Sharing, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._host, self._telemetry, self._sharing, self._silence = host, telemetry, sharing, silence_seconds
        self._open: set[_Conversation] = set()

    def drain(self) -> None:
        """End all sessions: their clients go elsewhere at once."""
        for conversation in self._open:
            conversation.end(Unavailable("the simulator is shutting down, open a session elsewhere"))

    async def Describe(self, request: sim_pb2.DescribeRequest, context: Context) -> sim_pb2.DescribeResponse:
        """The spec."""
        return self._host.describe()

    async def MakeStart(self, request: sim_pb2.MakeStartRequest, context: Context) -> sim_pb2.MakeStartResponse:
        """A start state."""
        if request.seed >= SEEDS:
            raise InvalidInput(f"seed {request.seed} is too large, expected less than 2^32")
        state = await asyncio.wrap_future(self._host.make_start(request.task, request.seed))
        self._telemetry.count("starts_made")
        return sim_pb2.MakeStartResponse(state=state)

    async def Session(
        self, request_iterator: AsyncIterator[sim_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[Any]:
        """One session, until the client ends it, falls silent or its environment dies."""
        opening = await _next(request_iterator, self._silence)
        if opening is None:
            return
        if opening.WhichOneof("message") != "open":
            raise InvalidInput(f"first message of a session is {opening.WhichOneof('message')}, expected open")
        choice, place = self._choose(opening.open.locality)
        try:
            session = self._host.open(_options(opening.open), place)
        except DvlaError:
            self._give_back(place)
            raise
        try:
            problem = await asyncio.wrap_future(session.opened)
            if problem:
                choice = self._without_shm(opening.open.locality, problem)
            opened = sim_pb2.SessionOpened(slots=session.slots, transport=choice.transport, reason=choice.reason)
            if place and not problem:
                opened.arena.CopyFrom(place.extent.message())
            log.info(
                "session opened", client=opening.open.client, transport=name_of(choice.transport), reason=choice.reason
            )
            self._telemetry.count(f"sessions_{name_of(choice.transport)}")
            yield sim_pb2.SessionResponse(opened=opened)
            conversation = _Conversation(session, request_iterator, self._telemetry, self._silence)
            self._open.add(conversation)
            async for reply in conversation.replies():
                yield reply
        finally:
            self._open = {other for other in self._open if not other.of(session)}
            session.close()
            self._give_back(place)
            log.info("session closed", client=opening.open.client)

    def _choose(self, theirs: common_pb2.Locality) -> tuple[Choice, RingPlace | None]:
        """A transport, and the place in shared memory that goes with it."""
        with suppress(Unavailable):  # no environment is up yet: opening the session says so
            self._sharing.prepare(self._host.describe())
        choice = self._sharing.choose(theirs)
        if choice.transport != SHM:
            return choice, None
        try:
            return choice, self._sharing.reserve(theirs.probe_nonce)
        except Exhausted as error:
            return self._without_shm(theirs, str(error)), None

    def _without_shm(self, theirs: common_pb2.Locality, reason: str) -> Choice:
        """Fall back to another transport. Raises Unsupported if the client accepts none."""
        return self._sharing.choose(theirs, reason)

    def _give_back(self, place: RingPlace | None) -> None:
        if place:
            self._sharing.release(place)


class _Conversation:
    """Strict turns, with pings answered at any time."""

    def __init__(
        self,
        session: HostedSession,
        requests: AsyncIterator[sim_pb2.SessionRequest],
        telemetry: Telemetry,
        silence: float,
    ) -> None:
        self._session, self._requests, self._telemetry, self._silence = session, requests, telemetry, silence
        self._out: asyncio.Queue[sim_pb2.SessionResponse | memoryview | Exception | None] = asyncio.Queue()
        self._turn: asyncio.Task[None] | None = None
        self._incoming: tuple[sim_pb2.Advance, codec.Assembler] | None = None  # an advance whose frames follow

    def of(self, session: HostedSession) -> bool:
        """Whether this is the conversation of a session."""
        return session is self._session

    def end(self, error: DvlaError) -> None:
        """End the session with an error."""
        self._out.put_nowait(error)

    async def replies(self) -> AsyncIterator[sim_pb2.SessionResponse | bytes]:
        """Everything to send, frames as the bytes of their message; raises what ends the session."""
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        try:
            while (reply := await self._out.get()) is not None:
                if isinstance(reply, Exception):
                    raise reply
                if isinstance(reply, memoryview):
                    for offset in range(0, len(reply), codec.FRAME_BYTES):
                        yield encode_frame(offset, reply[offset : offset + codec.FRAME_BYTES], field=3)
                else:
                    yield reply
        finally:
            for task in (*tasks, *([self._turn] if self._turn else [])):
                task.cancel()

    async def _read(self) -> None:
        try:
            while (request := await _next(self._requests, self._silence)) is not None:
                self._take(request)
            if self._turn:
                await self._turn
            self._out.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - the stream of replies raises it
            self._out.put_nowait(error)

    async def _watch(self) -> None:
        reason = await asyncio.wrap_future(self._session.lost)
        self.end(Unavailable(reason))

    def _take(self, request: sim_pb2.SessionRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "ping":
            self._out.put_nowait(sim_pb2.SessionResponse(pong=sim_pb2.Pong(nonce=request.ping.nonce)))
        elif kind == "advance":
            self._begin(request.advance)
        elif kind == "frame" and self._incoming:
            advance, assembler = self._incoming
            if assembler.add(request.frame):
                self._incoming = None
                advance.actions.inline = bytes(assembler.buffer)
                self._start(advance)
        else:
            raise InvalidInput(f"message {kind} is not expected here")

    def _begin(self, advance: sim_pb2.Advance) -> None:
        if self._incoming or (self._turn and not self._turn.done()):
            raise InvalidInput("an advance came before the previous one was answered; one turn at a time")
        location = advance.actions.WhichOneof("location")
        if location == "frames":
            self._incoming = advance, codec.Assembler(advance.actions, ACTION_LIMIT)
        elif location == "inline" or not advance.slots:
            self._start(advance)
        else:
            raise InvalidInput(f"actions are in {location or 'no place'}, expected inline or frames on this transport")

    def _start(self, advance: sim_pb2.Advance) -> None:
        self._turn = asyncio.create_task(self._answer(advance))

    async def _answer(self, advance: sim_pb2.Advance) -> None:
        try:
            reply, data = await asyncio.wrap_future(self._session.advance(advance))
        except DvlaError as error:
            self._out.put_nowait(error)
            return
        self._count(reply, len(advance.reset))
        if reply.payload.HasField("shm"):
            self._out.put_nowait(sim_pb2.SessionResponse(advanced=reply))
            return
        if len(data) <= codec.INLINE_LIMIT:
            reply.payload.inline = bytes(data)
        else:
            reply.payload.frames = -(-len(data) // codec.FRAME_BYTES)
        self._out.put_nowait(sim_pb2.SessionResponse(advanced=reply))
        if len(data) > codec.INLINE_LIMIT:
            self._out.put_nowait(memoryview(data))

    def _count(self, reply: sim_pb2.Advanced, resets: int) -> None:
        self._telemetry.count("turns")
        self._telemetry.count("episodes_started", resets)
        self._telemetry.count("env_steps", sum(outcome.executed for outcome in reply.outcomes))
        for outcome in reply.outcomes:
            if outcome.failure:
                self._telemetry.count("episodes_failed")
                log.warning("episode failed", reason=outcome.failure, step=outcome.step)
            elif outcome.terminated or outcome.truncated:
                self._telemetry.count("episodes_ended")


def add_to_server(servicer: SimServicer, server: grpc.aio.Server) -> None:
    """Serve; sessions send frames as they are, which is several copies less."""
    session: Any = grpc.stream_stream_rpc_method_handler(
        servicer.Session,
        request_deserializer=sim_pb2.SessionRequest.FromString,
        response_serializer=encode_session,
    )
    sim_pb2_grpc.add_SimServiceServicer_to_server(servicer, server)
    replace_handlers(server, "dvla.v1.SimService", {"Session": session})


def _options(opening: sim_pb2.OpenSession) -> SessionOptions:
    if opening.final_observation not in FINAL:
        raise InvalidInput(f"final_observation = {opening.final_observation}; expected one of {sorted(FINAL)}")
    return SessionOptions(tuple(opening.observation), FINAL[opening.final_observation], opening.record)


async def _next(requests: AsyncIterator[sim_pb2.SessionRequest], silence: float) -> sim_pb2.SessionRequest | None:
    """The next message, or None at the end of the stream. Raises Unavailable if the client falls silent."""
    try:
        async with asyncio.timeout(silence):  # Python 3.11's wait_for can swallow a cancellation
            return await anext(requests)
    except StopAsyncIteration:
        return None
    except TimeoutError as error:
        raise Unavailable(f"the client was silent for {silence:.0f} s, so the session ends") from error
