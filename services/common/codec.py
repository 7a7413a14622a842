"""Tensors to bytes and back: aligned raw arrays plus a typed header. No pickle, no copies on decoding.

The header is a list of `TensorMeta`; the bytes can lie in a message, in frames or in shared memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from dvla.v1 import common_pb2 as pb

from services.common.errors import InvalidInput
from services.common.spec import Array

ALIGNMENT = 64
MAX_DIMENSIONS = 16
MAX_VOLUME = 1 << 48
INLINE_LIMIT = 256 * 1024
FRAME_BYTES = 1024 * 1024
DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
"""dtypes that may cross a wire; everything else (objects, strings) is refused."""


@dataclass(frozen=True)
class Layout:
    """Where each array lies in one run of bytes."""

    tensors: tuple[pb.TensorMeta, ...]
    length: int


def plan(arrays: Mapping[str, Array]) -> Layout:
    """Lay arrays out one after another, each aligned; raises InvalidInput on a dtype that may not travel."""
    return plan_parts({name: [array] for name, array in arrays.items()})


def plan_parts(stacks: Mapping[str, Sequence[Array]]) -> Layout:
    """The same for tensors that are still in parts, one after another along their first axis."""
    tensors, offset = [], 0
    for name, parts in stacks.items():
        dtype, shape = parts[0].dtype, parts[0].shape
        if len(parts) > 1:
            shape = (sum(len(part) for part in parts), *shape[1:])
        known = _name(dtype)
        if known not in DTYPES:
            raise InvalidInput(f"tensor {name!r} has dtype {dtype}; expected one of {', '.join(sorted(DTYPES))}")
        tensors.append(pb.TensorMeta(name=name, dtype=known, shape=shape, offset=offset))
        offset = _aligned(offset + prod(shape) * dtype.itemsize)
    return Layout(tuple(tensors), offset)


def pack_into(buffer: memoryview, layout: Layout, arrays: Mapping[str, Array]) -> None:
    """Copy the arrays to their places in a writable buffer of at least `layout.length` bytes."""
    pack_parts_into(buffer, layout, {name: [array] for name, array in arrays.items()})


def pack_parts_into(buffer: memoryview, layout: Layout, stacks: Mapping[str, Sequence[Array]]) -> None:
    """The same for tensors in parts, which are joined where they are written."""
    for meta in layout.tensors:
        position = meta.offset
        for source in stacks[meta.name]:
            # The native dtype of that name: copying brings foreign byte orders into it.
            target = np.frombuffer(buffer, meta.dtype, source.size, position).reshape(source.shape)
            np.copyto(target, source)
            position += target.nbytes


def pack(arrays: Mapping[str, Array]) -> tuple[Layout, bytearray]:
    """Lay out and copy into a new buffer."""
    layout = plan(arrays)
    buffer = bytearray(layout.length)
    pack_into(memoryview(buffer), layout, arrays)
    return layout, buffer


def views(tensors: Sequence[pb.TensorMeta], buffer: bytes | bytearray | memoryview) -> dict[str, Array]:
    """Read-only views of the tensors in the buffer; raises InvalidInput if one does not fit."""
    out: dict[str, Array] = {}
    for meta in tensors:
        if meta.name in out:
            raise InvalidInput(f"tensor {meta.name!r} appears twice in one payload")
        out[meta.name] = _view(meta, buffer)
    return out


def _view(meta: pb.TensorMeta, buffer: bytes | bytearray | memoryview) -> Array:
    shape, size = tuple(meta.shape), len(buffer)
    name = f"tensor {meta.name!r} {meta.dtype}{shape} at {meta.offset}"
    if meta.dtype not in DTYPES:
        raise InvalidInput(f"{name} has an unknown dtype; expected one of {', '.join(sorted(DTYPES))}")
    # Empty tensors may have absurd sides: numpy multiplies the others all the same, in 64 bits.
    volume = prod(side or 1 for side in shape)
    if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or volume > MAX_VOLUME:
        raise InvalidInput(f"{name} has an impossible shape")
    dtype, count = np.dtype(meta.dtype), prod(shape)
    if meta.offset % ALIGNMENT or meta.offset + count * dtype.itemsize > size:
        raise InvalidInput(f"{name} is not aligned to {ALIGNMENT} bytes or ends beyond the payload's {size} bytes")
    view = np.frombuffer(buffer, dtype, count, meta.offset).reshape(shape)
    if dtype == np.bool_ and view.view(np.uint8).max(initial=0) > 1:
        raise InvalidInput(f"{name} holds a byte that is neither 0 nor 1")
    view.flags.writeable = False
    return view


def encode(arrays: Mapping[str, Array], hashed: bool = False) -> tuple[pb.Payload, memoryview]:
    """A payload and the bytes that follow it as frames; small payloads are inline and leave no bytes over."""
    layout, buffer = pack(arrays)
    digest = xxhash.xxh3_64_intdigest(buffer) if hashed else 0
    payload = pb.Payload(tensors=layout.tensors, length=layout.length, xxh3=digest)
    if layout.length <= INLINE_LIMIT:
        payload.inline = bytes(buffer)
        return payload, memoryview(b"")
    payload.frames = -(-layout.length // FRAME_BYTES)
    return payload, memoryview(buffer)


def frames(data: memoryview | bytes) -> Iterator[pb.Frame]:
    """Cut bytes into frames of at most 1 MiB."""
    for offset in range(0, len(data), FRAME_BYTES):
        yield pb.Frame(offset=offset, data=bytes(data[offset : offset + FRAME_BYTES]))


class Assembler:
    """Collects the frames of one payload; `add` returns True when it is complete."""

    def __init__(self, payload: pb.Payload, limit: int, room: npt.NDArray[np.uint8] | None = None) -> None:
        """room: memory to use if it is long enough; what was decoded from it before is void then."""
        if payload.length > limit:
            raise InvalidInput(f"payload of {payload.length} bytes is larger than the limit of {limit}")
        if not payload.frames or payload.frames != -(-payload.length // FRAME_BYTES):
            raise InvalidInput(f"payload of {payload.length} bytes announced in {payload.frames} frames")
        self._next = 0
        fits = room is not None and room.size >= payload.length
        self.room = room if room is not None and fits else np.empty(payload.length, np.uint8)
        self.buffer: memoryview = self.room[: payload.length].data

    def add(self, frame: pb.Frame) -> bool:
        """Take the next frame; frames come in order and without gaps."""
        return self.put(frame.offset, frame.data)

    def put(self, offset: int, data: bytes | memoryview) -> bool:
        """The same for a frame in its parts."""
        end = offset + len(data)
        if offset != self._next or end > len(self.buffer) or not 0 < len(data) <= FRAME_BYTES:
            raise InvalidInput(
                f"frame at {offset} of {len(data)} bytes; expected 1 to {FRAME_BYTES} bytes at "
                f"{self._next}, within {len(self.buffer)}"
            )
        self.buffer[offset:end] = data
        self._next = end
        return end == len(self.buffer)


def decode(payload: pb.Payload, data: bytes | bytearray | memoryview | None = None) -> dict[str, Array]:
    """Views of a payload's tensors. `data`: its bytes, where they are not inline. Checks length and hash."""
    raw = payload.inline if data is None else data
    if len(raw) != payload.length:
        raise InvalidInput(f"payload has {len(raw)} bytes; its header says {payload.length}")
    if payload.xxh3 and xxhash.xxh3_64_intdigest(raw) != payload.xxh3:
        raise InvalidInput("payload bytes do not match their hash")
    return views(payload.tensors, raw)


def receive(payload: pb.Payload, next_frame: Callable[[], pb.Frame], limit: int) -> dict[str, Array]:
    """Decode a payload that is inline, or that follows in frames; `next_frame` waits for one."""
    if payload.WhichOneof("location") != "frames":
        return decode(payload)
    assembler = Assembler(payload, limit)
    while not assembler.add(next_frame()):
        pass
    return decode(payload, assembler.buffer)


@cache
def _name(dtype: np.dtype[Any]) -> str:
    """numpy works a dtype's name out anew each time, which takes longer than copying a small tensor."""
    return dtype.name


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
