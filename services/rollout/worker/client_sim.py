"""Client of a simulator service: its spec, start states, and sessions of strict turns."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import grpc
import numpy as np
import structlog
from dvla.v1 import common_pb2, sim_pb2, sim_pb2_grpc

from services.common import codec
from services.common.arena.ring import RingReader
from services.common.channels import CALL_SECONDS, open_async_channel, translated
from services.common.errors import DvlaError, Exhausted, InvalidInput, Unavailable, Unsupported
from services.common.frame_wire import Piece, decode_session
from services.common.locality import Vicinity, name_of
from services.common.security import Security
from services.common.spec import Array, FloatArray, SimSpec, TensorSpec
from services.common.wire import spec_from_proto
from services.rollout.worker.reply import read_turn
from services.rollout.worker.turn import Reset, Turn

log = structlog.get_logger()

PING_SECONDS = 5.0
SILENCE_SECONDS = 15.0
TURN_SECONDS = 120.0
"""Longest turn: a batched simulator compiles kernels in its first one."""
PAYLOAD_LIMIT = 1 << 30
FINAL = {False: sim_pb2.FINAL_OBSERVATION_NONE, True: sim_pb2.FINAL_OBSERVATION_TRUNCATED}


class _NotShared(Exception):
    """The simulator chose shared memory, but its bytes are not there for us."""


class SimClient:
    """One simulator address."""

    def __init__(self, address: str, security: Security, vicinity: Vicinity | None = None) -> None:
        """vicinity: what this process may share with the simulator; by default nothing, so that grpc is used."""
        self.address = address
        self._vicinity = vicinity or Vicinity("grpc")
        self._channel = open_async_channel(address, security)
        self._stub = sim_pb2_grpc.SimServiceStub(self._channel)
        self._session: Any = self._channel.stream_stream(
            "/dvla.v1.SimService/Session", sim_pb2.SessionRequest.SerializeToString, decode_session
        )

    async def describe(self) -> tuple[SimSpec, int]:
        """The spec and the number of slots of one session."""
        with translated(f"simulator {self.address}"):
            reply = await self._stub.Describe(sim_pb2.DescribeRequest(), timeout=CALL_SECONDS)
        return spec_from_proto(reply.spec), reply.slots_per_session

    async def make_start(self, task: str, seed: int) -> bytes:
        """The start state of (task, seed); waits until the simulator has room to make it."""
        request = sim_pb2.MakeStartRequest(task=task, seed=seed)
        while True:
            try:
                with translated(f"simulator {self.address}"):
                    return (await self._stub.MakeStart(request, timeout=TURN_SECONDS)).state
            except Exhausted:
                await asyncio.sleep(0.5)

    async def open(self, client: str, observation: Sequence[str], final_observation: bool) -> "Session":
        """Open a session; raises Exhausted if the simulator is full, Unsupported if a forced transport is impossible.

        final_observation: also observe episodes that the step limit cut.
        """
        spec, _ = await self.describe()
        tensors = [tensor for tensor in spec.observation if not observation or tensor.name in observation]
        request = sim_pb2.OpenSession(
            client=client,
            locality=self._vicinity.locality(),
            observation=observation,
            final_observation=FINAL[final_observation],
        )
        try:
            return await self._open(request, tensors)
        except _NotShared as error:
            reason = f"no shm: {error}"
        if self._vicinity.forced:
            raise Unsupported(f"simulator {self.address}: {reason}")
        request.locality.CopyFrom(self._vicinity.locality(common_pb2.TRANSPORT_SHM))
        session = await self._open(request, tensors)
        session.transport += f"; {reason}"
        return session

    async def _open(self, request: sim_pb2.OpenSession, tensors: Sequence[TensorSpec]) -> "Session":
        session = Session(self.address, self._session(), tensors)
        await session.open(request, self._vicinity)
        return session

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class Session:
    """Exclusive use of some slots. One turn at a time; a reader task sorts replies from keep-alives."""

    def __init__(
        self,
        address: str,
        call: "grpc.aio.StreamStreamCall[sim_pb2.SessionRequest, sim_pb2.SessionResponse | Piece]",
        tensors: Sequence[TensorSpec],
    ) -> None:
        self.address = address
        self.slots = 0
        self.transport = ""
        self._ring: RingReader | None = None
        self._room = np.empty(0, np.uint8)  # frames are put together here; rows that are kept are copied
        self._call, self._tensors = call, tensors
        self._replies: asyncio.Queue[sim_pb2.SessionResponse | Piece | DvlaError] = asyncio.Queue()
        self._end: DvlaError | None = None
        self._writing = asyncio.Lock()
        self._heard = asyncio.get_running_loop().time()
        self._reader, self._pinger = asyncio.create_task(self._read()), asyncio.create_task(self._ping())

    async def open(self, request: sim_pb2.OpenSession, vicinity: Vicinity) -> None:
        """Say who we are and what we want."""
        try:
            await self._write(sim_pb2.SessionRequest(open=request))
            opened = (await self._reply("opened", CALL_SECONDS)).opened
            if opened.transport == common_pb2.TRANSPORT_SHM:
                self._ring = _ring(opened, vicinity)
        except BaseException:
            await self.close()
            raise
        self.slots = opened.slots
        self.transport = f"{name_of(opened.transport)}: {opened.reason}"

    async def advance(self, resets: Sequence[Reset], slots: Sequence[int], actions: FloatArray | None) -> Turn:
        """Reset some slots, advance others by their chunk of actions [n, C, D]; returns when all are done."""
        reply, arrays = await self.exchange(resets, slots, actions)
        chunk = (0, 0) if actions is None else (actions.shape[1], actions.shape[2])
        return read_turn(reply, arrays, self._tensors, [reset.slot for reset in resets], slots, chunk)

    async def exchange(
        self, resets: Sequence[Reset], slots: Sequence[int], actions: FloatArray | None
    ) -> tuple[sim_pb2.Advanced, dict[str, Array]]:
        """The same turn, its reply as it came: views of tensors that are valid until the next turn."""
        request = sim_pb2.Advance(slots=slots)
        for reset in resets:
            request.reset.add(
                slot=reset.slot,
                task=reset.task,
                start=reset.start,
                seed=reset.seed,
                end_on_success=reset.end_on_success,
            )
        rest = memoryview(b"")
        if actions is not None:
            payload, rest = codec.encode({"action": actions})
            request.actions.CopyFrom(payload)
        await self._write(sim_pb2.SessionRequest(advance=request))
        for frame in codec.frames(rest):
            await self._write(sim_pb2.SessionRequest(frame=frame))
        reply = (await self._reply("advanced", TURN_SECONDS)).advanced
        return reply, await self._arrays(reply.payload)

    async def _arrays(self, payload: common_pb2.Payload) -> dict[str, Array]:
        if payload.WhichOneof("location") == "shm":
            if self._ring is None:
                raise InvalidInput(f"simulator {self.address} sent bytes in shared memory over {self.transport}")
            return self._ring.arrays(payload)
        if payload.WhichOneof("location") != "frames":
            return codec.decode(payload)
        assembler = codec.Assembler(payload, PAYLOAD_LIMIT, self._room)
        self._room = assembler.room
        while not assembler.put(*await self._frame()):
            pass
        return codec.decode(payload, assembler.buffer)

    async def close(self) -> None:
        """End the session; the simulator frees its slots."""
        self._reader.cancel()
        self._pinger.cancel()
        self._call.cancel()
        await asyncio.gather(self._reader, self._pinger, return_exceptions=True)
        if self._ring is not None:
            self._ring.close()

    async def _write(self, request: sim_pb2.SessionRequest) -> None:
        try:
            with translated(f"simulator {self.address}"):
                # gRPC takes one write at a time on a call, and the keep-alive writes too.
                async with asyncio.timeout(CALL_SECONDS), self._writing:
                    await self._call.write(request)
        except TimeoutError as error:
            raise Unavailable(f"simulator {self.address} took no message for {CALL_SECONDS:.0f} s") from error
        except asyncio.InvalidStateError as error:  # the call is over; the reader gets the reason
            await asyncio.wait([self._reader], timeout=CALL_SECONDS)
            raise self._end or Unavailable(f"simulator {self.address} closed the session") from error

    async def _reply(self, kind: str, seconds: float) -> sim_pb2.SessionResponse:
        reply = await self._next(seconds)
        said = "frame" if isinstance(reply, tuple) else reply.WhichOneof("message")
        if isinstance(reply, tuple) or said != kind:
            raise InvalidInput(f"simulator {self.address} sent {said}; expected {kind}")
        return reply

    async def _frame(self) -> Piece:
        reply = await self._next(TURN_SECONDS)
        if not isinstance(reply, tuple):
            said = reply.WhichOneof("message")
            raise InvalidInput(f"simulator {self.address} sent {said}; expected frame")
        return reply

    async def _next(self, seconds: float) -> sim_pb2.SessionResponse | Piece:
        try:
            async with asyncio.timeout(seconds):  # Python 3.11's wait_for can swallow a cancellation
                reply = await self._replies.get()
        except TimeoutError as error:
            raise Unavailable(f"simulator {self.address} did not answer within {seconds:.0f} s") from error
        if isinstance(reply, DvlaError):
            raise reply
        return reply

    async def _read(self) -> None:
        try:
            with translated(f"simulator {self.address}"):
                async for reply in self._call:
                    self._heard = asyncio.get_running_loop().time()
                    if isinstance(reply, tuple) or reply.WhichOneof("message") != "pong":
                        self._replies.put_nowait(reply)
            raise Unavailable(f"simulator {self.address} closed the session")
        except DvlaError as error:  # whoever waits for a reply, or writes next, raises it
            self._end = error
            self._replies.put_nowait(error)

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            for nonce in count(1):
                await asyncio.sleep(PING_SECONDS)
                if loop.time() - self._heard > SILENCE_SECONDS:
                    raise Unavailable(f"simulator {self.address} was silent for {SILENCE_SECONDS:.0f} s")
                await self._write(sim_pb2.SessionRequest(ping=sim_pb2.Ping(nonce=nonce)))
        except DvlaError as error:
            self._replies.put_nowait(error)


def _ring(opened: sim_pb2.SessionOpened, vicinity: Vicinity) -> RingReader:
    """The other direction of the probe: read the nonce that the simulator's side wrote for us."""
    if vicinity.peer is None:
        raise _NotShared("it was not asked for")
    try:
        return RingReader(vicinity.peer, opened.arena, vicinity.nonce)
    except DvlaError as error:
        raise _NotShared(str(error)) from error
