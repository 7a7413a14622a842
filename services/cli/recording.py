"""Records episodes of a policy in a simulator service: one session that draws every control step, as mp4 files."""

import io
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from dvla.v1 import sim_pb2

from services.common.errors import Exhausted, Unavailable
from services.common.spec import Array, Observation
from services.policies.base import Policy
from services.policies.noise import RowNoise
from services.sim.client import SimClient, SimSession, reset_slot

FRAMES_PER_SECOND = 20
WAIT_SECONDS = 30.0
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


def open_recording(client: SimClient, policy: Policy) -> SimSession:
    """A session that draws; waits for a free one, because workers give theirs back only after a moment."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return client.open(client="record", observation=policy.spec.observation, record=True)
        except (Exhausted, Unavailable):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def record(client: SimClient, session: SimSession, policy: Policy, task: str, seed: int) -> Episode:
    """One episode to the horizon with the policy's most likely actions, as an evaluation runs it. Uses slot 0."""
    spec, _ = client.describe()
    episode = Episode(task, spec.task(task).instruction, seed)
    start = client.make_start(task, seed) if spec.starts == "state" else b""
    observation, ended = _take(episode, *session.advance([reset_slot(0, task, start, seed, end_on_success=False)]))
    for chunk in range(spec.task(task).max_steps):
        if ended:
            break
        inputs = policy.preprocess(observation, [episode.instruction])
        act = policy.act(inputs, "eval", RowNoise([f"evaluate/{task}/{seed}/{chunk}"]))
        turn = session.advance(slots=[0], actions=policy.postprocess(act.actions))
        observation, ended = _take(episode, *turn)
    return episode


def _take(episode: Episode, reply: sim_pb2.Advanced, arrays: dict[str, Array]) -> tuple[Observation, bool]:
    episode.frames += list(reply.frames)
    if "success" in arrays:
        episode.success |= bool(arrays["success"].any())
    ended = any(outcome.terminated or outcome.truncated or outcome.failure for outcome in reply.outcomes)
    return {name.removeprefix("obs/"): array for name, array in arrays.items() if name.startswith("obs/")}, ended


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
