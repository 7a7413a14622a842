"""Records episodes of a policy in a simulator service: one session that draws every control step, as mp4 files."""

import io
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from dvla.v1 import common_pb2, sim_pb2, sim_pb2_grpc

from services.common import codec
from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.errors import Exhausted, Unavailable
from services.common.spec import Array, Observation
from services.common.wire import spec_from_proto
from services.policies.base import Policy
from services.policies.noise import RowNoise

FRAMES_PER_SECOND = 20
WAIT_SECONDS = 30.0
TURN_SECONDS = 120.0
PING_SECONDS = 5.0
PAYLOAD_LIMIT = 1 << 30
WIDTH = 256
"""Small pictures are enlarged to about this width."""
BAR = 28
"""Height of the strip with the instruction, in pixels."""


@dataclass
class Episode:
    """One recorded episode. frames: JPEG bytes, one for the start and one per control step."""

    task: str
    instruction: str
    seed: int
    success: bool = False
    frames: list[bytes] = field(default_factory=list)


class RecordingSession:
    """A session of strict turns on slot 0 that draws; keep-alives go out while a slow renderer works.

    Opening it waits for a free session, because workers give theirs back only after a moment.
    """

    def __init__(self, address: str, policy: Policy) -> None:
        self._address = address
        self._channel = open_channel(address)
        self._stub = sim_pb2_grpc.SimServiceStub(self._channel)
        with translated(address):
            reply = self._stub.Describe(sim_pb2.DescribeRequest(), timeout=CALL_SECONDS)
        self.spec = spec_from_proto(reply.spec)
        self._ended = threading.Event()
        self._open(
            sim_pb2.OpenSession(
                client="record",
                locality=common_pb2.Locality(transports=[common_pb2.TRANSPORT_GRPC]),
                observation=policy.spec.observation,
                record=True,
            )
        )
        threading.Thread(target=self._ping, name="ping", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._requests.put(None)
        self._channel.close()

    def make_start(self, task: str, seed: int) -> bytes:
        """The start state of (task, seed); nothing where the simulator makes it itself."""
        if self.spec.starts != "state":
            return b""
        request = sim_pb2.MakeStartRequest(task=task, seed=seed)
        with translated(self._address):
            return self._stub.MakeStart(request, timeout=TURN_SECONDS).state

    def advance(self, turn: sim_pb2.Advance) -> tuple[sim_pb2.Advanced, dict[str, Array]]:
        """One turn; returns the reply and its tensors."""
        self._requests.put(sim_pb2.SessionRequest(advance=turn))
        reply = self._receive().advanced
        return reply, codec.receive(reply.payload, lambda: self._receive().frame, PAYLOAD_LIMIT)

    def _open(self, opening: sim_pb2.OpenSession) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            self._requests: queue.SimpleQueue[sim_pb2.SessionRequest | None] = queue.SimpleQueue()
            self._requests.put(sim_pb2.SessionRequest(open=opening))
            self._replies = self._stub.Session(iter(self._requests.get, None))
            try:
                self._receive()
                return
            except (Exhausted, Unavailable):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _receive(self) -> sim_pb2.SessionResponse:
        with translated(self._address):
            for reply in self._replies:
                if reply.WhichOneof("message") != "pong":
                    return reply
        raise Unavailable(f"simulator {self._address} closed the session")

    def _ping(self) -> None:
        while not self._ended.wait(PING_SECONDS):
            self._requests.put(sim_pb2.SessionRequest(ping=sim_pb2.Ping(nonce=1)))


def record(session: RecordingSession, policy: Policy, task: str, seed: int) -> Episode:
    """One episode to the horizon with the policy's most likely actions, as an evaluation runs it."""
    known = session.spec.task(task)
    episode = Episode(task, known.instruction, seed)
    start = sim_pb2.ResetSlot(slot=0, task=task, start=session.make_start(task, seed), seed=seed)
    observation, ended = _take(episode, *session.advance(sim_pb2.Advance(reset=[start])))
    for chunk in range(known.max_steps):
        if ended:
            break
        inputs = policy.preprocess(observation, [episode.instruction])
        act = policy.act(inputs, "eval", RowNoise([f"evaluate/{task}/{seed}/{chunk}"]))
        payload, _ = codec.encode({"action": policy.postprocess(act.actions)})
        observation, ended = _take(episode, *session.advance(sim_pb2.Advance(slots=[0], actions=payload)))
    return episode


def _take(episode: Episode, reply: sim_pb2.Advanced, arrays: dict[str, Array]) -> tuple[Observation, bool]:
    episode.frames += list(reply.frames)
    if "success" in arrays:
        episode.success |= bool(arrays["success"].any())
    ended = any(outcome.terminated or outcome.truncated or outcome.failure for outcome in reply.outcomes)
    # Copies: torch wants writable memory.
    return {n.removeprefix("obs/"): array.copy() for n, array in arrays.items() if n.startswith("obs/")}, ended


def write_video(path: Path, episode: Episode) -> None:
    """The episode as mp4, with its instruction and its end above the picture. Whole or not at all."""
    import imageio.v2 as imageio

    partial = path.with_suffix(".partial.mp4")
    imageio.mimwrite(partial, list(_drawn(episode)), fps=FRAMES_PER_SECOND, codec="libx264", macro_block_size=2)
    partial.replace(path)


def _drawn(episode: Episode) -> Iterator[Array]:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(12)
    for index, data in enumerate(episode.frames):
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        scale = max(1, round(WIDTH / picture.width))
        # Enlarged without smoothing, and to even sides, which the video codec demands.
        size = (picture.width * scale // 2 * 2, picture.height * scale // 2 * 2)
        picture = picture.resize(size, Image.Resampling.NEAREST)
        canvas = Image.new("RGB", (picture.width, picture.height + BAR), (24, 28, 34))
        canvas.paste(picture, (0, BAR))
        last = index == len(episode.frames) - 1
        end = (": success" if episode.success else ": no success") if last else ""
        ImageDraw.Draw(canvas).text((6, 7), episode.instruction + end, (235, 235, 235), font)
        yield np.asarray(canvas)
