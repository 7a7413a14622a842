"""Frames of slot 0 for a video, as JPEG."""

import io

import numpy as np

from services.common.errors import Unsupported
from services.common.spec import Array, IntArray
from services.sim.vector import VectorSim

QUALITY = 85


class Recorder:
    """Collects one frame of slot 0 per reset and control step."""

    def __init__(self, sim: VectorSim) -> None:
        self._sim = sim
        self._frames: list[bytes] = []

    def look(self, slots: IntArray) -> None:
        """Draw slot 0 if it is among the slots that just changed."""
        if 0 in slots:
            frame = self._sim.render(0)
            if frame is None:
                raise Unsupported(f"{self._sim.spec.backend} draws no frames, so it cannot be recorded")
            self._frames.append(jpeg(frame))

    def take(self) -> list[bytes]:
        """The frames since the last call."""
        frames, self._frames = self._frames, []
        return frames


def jpeg(frame: Array) -> bytes:
    """A uint8 [H, W, 3] image as JPEG bytes."""
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise Unsupported("recording needs pillow; pip install pillow") from error
    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame, np.uint8)).save(data, "JPEG", quality=QUALITY)
    return data.getvalue()
