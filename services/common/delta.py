"""What changed between two versions of one layout, losslessly: gaps between changed elements and their new values.

Absolute values, so applying a delta twice does no harm. Elements are compared as bits (NaN equals itself). A gap
has 16 bits; over a longer run of unchanged elements one of them is listed with the value it has. Gaps and values are
cut into columns of like bytes (PULSE, arXiv 2602.03839, codes gaps + zstd likewise), each its own zstd frame:

    11 x uint64: length of each column as it follows, compressed
    table (uint32 tensor, uint64 entries) | gaps, low byte | gaps, high byte | values, byte 0 | ... | byte 7
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from services.common.bundle import DTYPES, Buffer, Layout, Version, WeightTensor, as_bytes, memory
from services.common.errors import ConfigError, InvalidInput

ENCODING = "gap-zstd-1"
STEP = 4 * 1024 * 1024
"""Bytes compared at once, and entries decoded at once: bounds the working memory."""
MAX_BYTES = 2**31
"""No delta is longer than this: beyond, a dense version resumes better."""
_COLUMNS = 11
_HEADER = struct.Struct(f"<{_COLUMNS}Q")
_ROW = struct.Struct("<IQ")
_REACH = 65_536  # elements that one gap can skip, the listed one included
Words = npt.NDArray[np.unsignedinteger[npt.NBitBase]]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DeltaRule:
    """When a delta is worth it. density: largest share of changed elements; anchor: dense every so many updates."""

    density: float = 0.1
    anchor: int = 25

    def __post_init__(self) -> None:
        if not 0 <= self.density <= 1:
            raise ConfigError(f"delta_density = {self.density}; expected 0 (never a delta) to 1")
        if self.anchor < 1:
            raise ConfigError(f"delta_anchor = {self.anchor}; expected 1 (never a delta) or more updates")

    def allows(self, base: Version, version: Version) -> bool:
        """Whether no dense anchor is due between these two."""
        same_epoch = base.epoch == version.epoch
        return self.density > 0 and same_epoch and base.update // self.anchor == version.update // self.anchor


@dataclass(frozen=True)
class Delta:
    """An encoded delta. changed of elements: how many differ."""

    base: Version
    data: bytes
    changed: int
    elements: int

    @property
    def density(self) -> float:
        """Share of elements that differ."""
        return self.changed / max(1, self.elements)


def encode(layout: Layout, base: Version, old: Buffer, new: Buffer, density: float = 1.0) -> Delta | None:
    """The delta from `old` to `new`; None if more than `density` of the elements differ, or dense is cheaper."""
    before, after = as_bytes(old, layout.length), as_bytes(new, layout.length)
    elements = sum(t.length // _width(t) for t in layout.tensors)
    columns, table = [_Column() for _ in range(_COLUMNS)], bytearray()
    changed = 0
    for number, tensor in enumerate(layout.tensors):
        entries = 0
        for found, listed, values, gaps in _changes(tensor, before, after):
            changed, entries = changed + found, entries + listed
            if changed > density * elements:
                return None
            columns[1].add(gaps.astype(np.uint8))
            columns[2].add((gaps >> 8).astype(np.uint8))
            for byte, plane in enumerate(_planes(values)):
                columns[3 + byte].add(plane)
        if entries:
            table += _ROW.pack(number, entries)
    columns[0].add(np.frombuffer(table, np.uint8))
    parts = [column.end() for column in columns]
    data = b"".join([_HEADER.pack(*map(len, parts)), *parts])
    return Delta(base, data, changed, elements) if len(data) < min(layout.length, MAX_BYTES) else None


def apply(layout: Layout, buffer: Buffer, data: Buffer) -> int:
    """Bring a writable buffer from the base to the new version; returns how many elements were listed.

    Raises InvalidInput if the data is damaged; the buffer may then be half changed. Compare all hashes afterwards:
    they say whether the buffer had the right base.
    """
    flat, columns = as_bytes(buffer, layout.length), _split(memory(data))
    table = columns[0].take_all(_ROW.size * len(layout.tensors))
    if len(table) % _ROW.size:
        raise InvalidInput("delta has a damaged table")
    total, previous = 0, -1
    for number, entries in _ROW.iter_unpack(table):
        if not previous < number < len(layout.tensors):
            raise InvalidInput(f"delta lists tensor {number} after {previous}, of {len(layout.tensors)}")
        previous = number
        _apply_tensor(layout.tensors[number], entries, flat, columns)
        total += entries
    for column in columns:
        column.expect_end()
    return total


def _apply_tensor(tensor: WeightTensor, entries: int, flat: npt.NDArray[np.uint8], columns: "list[_Reader]") -> None:
    width = _width(tensor)
    target = _words(tensor, flat)
    if not 0 < entries <= target.size:
        raise InvalidInput(f"delta lists {entries} changes of tensor {tensor}")
    last = -1
    for start in range(0, entries, STEP):
        count = min(STEP, entries - start)
        gaps = columns[1].take(count).astype(np.int64) | columns[2].take(count).astype(np.int64) << 8
        indices = np.cumsum(gaps + 1) + last
        last = int(indices[-1])
        if last >= target.size:
            raise InvalidInput(f"delta reaches element {last} of tensor {tensor}")
        planes = np.stack([columns[3 + byte].take(count) for byte in range(width)], axis=1)
        target[indices] = planes.reshape(-1).view(target.dtype)


def _changes(
    tensor: WeightTensor, before: npt.NDArray[np.uint8], after: npt.NDArray[np.uint8]
) -> Iterator[tuple[int, int, Words, npt.NDArray[np.uint16]]]:
    """(changed, listed, values, gaps) of one piece after another; a gap counts the elements that lie between."""
    old, new = _words(tensor, before), _words(tensor, after)
    step, last = STEP // _width(tensor), -1
    for start in range(0, new.size, step):
        indices = np.flatnonzero(old[start : start + step] != new[start : start + step]) + start
        if not indices.size:
            continue
        listed = _bridged(indices, last)
        gaps = np.diff(listed, prepend=last) - 1
        last = int(indices[-1])
        yield indices.size, listed.size, new[listed], gaps.astype(np.uint16)


def _bridged(indices: Indices, last: int) -> Indices:
    """The indices, and unchanged ones between them wherever a gap does not fit into 16 bits."""
    distance = np.diff(indices, prepend=last)
    if int(distance.max()) <= _REACH:
        return indices
    extra = (distance - 1) // _REACH  # how many to put before each
    ends = np.cumsum(extra + 1)
    out = np.empty(int(ends[-1]), np.int64)
    order = np.arange(out.size) - np.repeat(ends - extra - 1, extra + 1)  # 0, 1, ... before and at each index
    out[:] = np.repeat(indices - distance, extra + 1) + (order + 1) * _REACH
    out[ends - 1] = indices
    return out


def _width(tensor: WeightTensor) -> int:
    return np.dtype(DTYPES[tensor.dtype]).itemsize


def _words(tensor: WeightTensor, flat: npt.NDArray[np.uint8]) -> Words:
    return flat[tensor.offset : tensor.offset + tensor.length].view(f"<u{_width(tensor)}")


def _planes(values: Words) -> npt.NDArray[np.uint8]:
    """uint8 [bytes of a value, values], lowest byte first."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)


class _Column:
    """One column on its way into a zstd frame."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=1).compressobj()
        self._parts: list[bytes] = []

    def add(self, data: npt.NDArray[np.uint8]) -> None:
        self._parts.append(self._compressor.compress(memory(data)))

    def end(self) -> bytes:
        return b"".join([*self._parts, self._compressor.flush()])


class _Reader:
    """One column on its way out."""

    def __init__(self, data: memoryview) -> None:
        self._stream = zstandard.ZstdDecompressor(max_window_size=2**23).stream_reader(data)

    def take(self, count: int) -> npt.NDArray[np.uint8]:
        out = np.empty(count, np.uint8)
        view, done = memory(out), 0
        while done < count:
            got = self._read(view[done:])
            if not got:
                raise InvalidInput(f"delta ends {count - done} bytes too early")
            done += got
        return out

    def take_all(self, most: int) -> bytes:
        out = np.empty(most + 1, np.uint8)
        view, done = memory(out), 0
        while done <= most and (got := self._read(view[done:])):
            done += got
        if done > most:
            raise InvalidInput("delta lists more tensors than there are")
        return out[:done].tobytes()

    def expect_end(self) -> None:
        if self._read(memory(np.empty(1, np.uint8))):
            raise InvalidInput("delta goes on after its last value")

    def _read(self, view: memoryview) -> int:
        try:
            return self._stream.readinto(view)
        except zstandard.ZstdError as error:
            raise InvalidInput(f"delta is damaged: {error}") from error


def _split(data: memoryview) -> list[_Reader]:
    if len(data) < _HEADER.size:
        raise InvalidInput(f"delta of {len(data)} bytes has no header")
    lengths = _HEADER.unpack_from(data)
    if sum(lengths) != len(data) - _HEADER.size:
        raise InvalidInput(f"delta of {len(data)} bytes announces columns of {sum(lengths)}")
    readers, position = [], _HEADER.size
    for length in lengths:
        readers.append(_Reader(data[position : position + length]))
        position += length
    return readers
