"""One session's part of an arena: two halves that its writer fills in turn, and its reader views in turn.

The writer fills the half that the reader does not look at, so a reply's views stay valid until the reply after the
next one. Nothing is allocated per turn. Strict turns are the synchronisation: a message says which half is full.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
from dvla.v1 import common_pb2 as pb

from services.common import codec
from services.common.arena.peer import Lease, Peer
from services.common.arena.table import Extent
from services.common.errors import InvalidInput
from services.common.spec import Array, TensorSpec


def turn_bytes(tensors: Sequence[TensorSpec], rows: int, extra: int = 0) -> int:
    """Room for one turn: `rows` of these tensors, and so many further bytes per row."""
    sizes = [rows * prod(tensor.shape) * np.dtype(tensor.dtype).itemsize for tensor in tensors]
    return sum(-(-size // codec.ALIGNMENT) * codec.ALIGNMENT for size in sizes) + rows * extra + 16 * codec.ALIGNMENT


class RingWriter:
    """The writing side, opened from an extent of 2 * half bytes that the arena's owner reserved."""

    def __init__(self, peer: Peer, extent: Extent, nonce: bytes) -> None:
        self._lease, self._extent = peer.write(extent), extent
        self._half = extent.length // 2 // codec.ALIGNMENT * codec.ALIGNMENT
        self._turn = 0
        self._lease.view[: len(nonce)] = np.frombuffer(nonce, np.uint8)

    def place(self, length: int) -> tuple[pb.Extent, memoryview] | None:
        """Where the next turn's bytes go, and the room to write them; None if they are too many for a half."""
        if length > self._half:
            return None
        start = self._half * (self._turn % 2)
        self._turn += 1
        extent = Extent(self._extent.arena, self._extent.offset + start, length, self._extent.generation)
        return extent.message(), self._lease.view[start : start + length].data

    def close(self) -> None:
        """Let go of the extent."""
        self._lease.close()


class RingReader:
    """The reading side."""

    def __init__(self, peer: Peer, message: pb.Extent, nonce: bytes) -> None:
        """Open the extent and compare the nonce. Raises NotFound or InvalidInput if it is not what was promised."""
        self._extent = Extent.of(message)
        self._lease: Lease = peer.read(self._extent, sealed=False)
        if self._lease.view[: len(nonce)].tobytes() != nonce:
            self._lease.close()
            raise InvalidInput(f"{self._extent} does not begin with the nonce of this session")

    def arrays(self, payload: pb.Payload) -> dict[str, Array]:
        """Views of a turn's tensors, valid until the reply after the next one."""
        return codec.decode(payload, self._bytes(payload).data)

    def close(self) -> None:
        """Let go of the extent."""
        self._lease.close()

    def _bytes(self, payload: pb.Payload) -> npt.NDArray[np.uint8]:
        part, whole = Extent.of(payload.shm), self._extent
        start = part.offset - whole.offset
        inside = start >= 0 and start + part.length <= whole.length and part.length == payload.length
        if (part.arena, part.generation) != (whole.arena, whole.generation) or not inside:
            raise InvalidInput(f"{part} of {payload.length} bytes is no part of this session's {whole}")
        return self._lease.view[start : start + part.length]
