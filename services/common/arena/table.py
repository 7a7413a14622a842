"""What an arena's file says of itself: a header page, then one entry for each extent, then the bytes.

Only the owner writes, each time one entry with one small `pwrite` inside a page, which a kill cannot tear. So an owner
that dies at any instant leaves a table that the next one can adopt. Peers read the mapped table under the locks.

    page 0: magic, file size, number of entries, newest generation; byte 0 carries the owner's lock
    then:   entries of 64 bytes; byte 0 of an entry carries its writer's lock, byte 1 the shared locks of its readers
    then:   the bytes, from a page boundary
"""

import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from dvla.v1 import common_pb2 as pb

from services.common.errors import InvalidInput
from services.common.flatfile import HEADER_BYTES

ENTRY_BYTES = 64
WRITER_BYTE, READER_BYTE = 0, 1
_MAGIC = b"dvlaarn1"
_HEADER = struct.Struct("<8sQQQ")
_ENTRY = struct.Struct("<QQQQQ")
ENTRY = np.dtype(
    [("state", "<u8"), ("generation", "<u8"), ("offset", "<u8"), ("length", "<u8"), ("room", "<u8"), ("", "V24")]
)


class State(IntEnum):
    """Of an extent. Reserved: its writer may write. Sealed: immutable, readers may read. Doomed: freed, but in use."""

    FREE = 0
    RESERVED = 1
    SEALED = 2
    DOOMED = 3


@dataclass(frozen=True)
class Extent:
    """A range of bytes in the arena `arena` (a file name). offset counts from the first byte of the file.

    generation: unique in this arena, so that a handle of an extent that was freed is never taken for its successor.
    Its remainder by the number of entries is the entry, so that a peer finds it without a search.
    """

    arena: str
    offset: int
    length: int
    generation: int

    def message(self) -> pb.Extent:
        """For the wire."""
        return pb.Extent(arena=self.arena, offset=self.offset, length=self.length, generation=self.generation)

    @staticmethod
    def of(message: pb.Extent) -> "Extent":
        """From the wire; whoever opens it checks every number."""
        return Extent(message.arena, message.offset, message.length, message.generation)


@dataclass(frozen=True)
class Entry:
    """One row of the table. room: bytes reserved, of which `length` count."""

    state: State
    generation: int
    offset: int
    length: int
    room: int


def data_start(entries: int) -> int:
    """Where the bytes begin, for a table of so many entries."""
    return HEADER_BYTES + -(-entries * ENTRY_BYTES // HEADER_BYTES) * HEADER_BYTES


def entry_position(number: int) -> int:
    """Where an entry begins in the file."""
    return HEADER_BYTES + number * ENTRY_BYTES


def next_generation(newest: int, number: int, entries: int) -> int:
    """The first generation after the newest one that belongs to this entry."""
    return newest + 1 + (number - newest - 1) % entries


def write_header(fd: int, size: int, entries: int, generation: int) -> None:
    """State size, entries and the newest generation."""
    os.pwrite(fd, _HEADER.pack(_MAGIC, size, entries, generation), 0)


def read_header(fd: int, name: str) -> tuple[int, int, int]:
    """Size, entries and newest generation. Raises InvalidInput if this is no arena, or one cut short or with holes."""
    facts = os.fstat(fd)
    raw = os.pread(fd, _HEADER.size, 0)
    magic, size, entries, generation = _HEADER.unpack(raw) if len(raw) == _HEADER.size else (b"", 0, 0, 0)
    if magic != _MAGIC or not 0 < entries < 2**32 or size <= data_start(entries):
        raise InvalidInput(f"shared-memory file {name!r} is no arena")
    if facts.st_size != size or facts.st_blocks * 512 < size:
        raise InvalidInput(f"arena {name!r} says {size} bytes but has {facts.st_size}, or has holes")
    return size, entries, generation


def write_entry(fd: int, number: int, entry: Entry) -> None:
    """State one entry."""
    raw = _ENTRY.pack(entry.state, entry.generation, entry.offset, entry.length, entry.room)
    os.pwrite(fd, raw, entry_position(number))


def table_of(data: npt.NDArray[np.uint8], entries: int) -> npt.NDArray[Any]:
    """The entries, as a view of the mapped bytes that follow the header page."""
    return data[: entries * ENTRY_BYTES].view(ENTRY)


def read_entry(table: npt.NDArray[Any], number: int) -> Entry:
    """One entry; raises InvalidInput for a state that there is not."""
    state, generation, offset, length, room = (int(table[number][field]) for field in ENTRY.names[:5])  # type: ignore[index]
    if state not in State.__members__.values():
        raise InvalidInput(f"entry {number} of an arena is in state {state}, which there is not")
    return Entry(State(state), generation, offset, length, room)
