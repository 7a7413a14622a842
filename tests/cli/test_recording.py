from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest

from services.cli.recording import BAR, Episode, RecordingSession, record, write_video
from services.policies.base import Policy
from services.policies.config import PolicyConfig
from services.policies.registry import build_policy
from services.sim.recording import jpeg
from services.sim.toy import ToySim
from tests.sim.serving import serving


@pytest.fixture(scope="module")
def policy() -> Policy:
    config = PolicyConfig.for_sim(ToySim(1).spec, chunk=4)
    return build_policy(config).requires_grad_(False).eval()


def test_every_control_step_is_in_the_video(tmp_path: Path, policy: Policy) -> None:
    with (
        serving(tmp_path, lambda: ToySim(2, max_steps=10)) as (service, _),
        RecordingSession(service.address, policy) as session,
    ):
        first = record(session, policy, "reach", 7)
        again = record(session, policy, "reach", 7)
        other = record(session, policy, "reach", 8)
    assert len(first.frames) == 11, "the start and 10 steps"
    assert first.instruction == "move the point to the goal"
    assert first.frames == again.frames, "one start and one policy give one episode"
    assert first.frames != other.frames
    path = tmp_path / "one.mp4"
    write_video(path, first)
    frames = iio.imread(path, plugin="FFMPEG")
    assert frames.shape == (11, 256 + BAR, 256, 3)
    assert [p.name for p in tmp_path.glob("*.mp4")] == ["one.mp4"]


def test_success_is_told_at_the_end_of_the_video(tmp_path: Path) -> None:
    frames = [jpeg(np.full((64, 64, 3), shade, np.uint8)) for shade in (10, 200)]
    won, lost = (Episode("reach", "go", 1, success, list(frames)) for success in (True, False))
    write_video(tmp_path / "won.mp4", won)
    write_video(tmp_path / "lost.mp4", lost)
    won_frames, lost_frames = (iio.imread(tmp_path / f"{name}.mp4", plugin="FFMPEG") for name in ("won", "lost"))
    strip = np.s_[:, :BAR]
    assert np.abs(won_frames[strip][0].astype(int) - lost_frames[strip][0]).max() < 20
    assert np.abs(won_frames[strip][1].astype(int) - lost_frames[strip][1]).max() > 60
