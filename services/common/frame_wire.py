"""Bulk frames on the wire without protobuf's two copies on each side. The bytes are those of the messages.

FetchResponse and PublishRequest hold a `Frame` as field 2, SessionResponse as field 3, and a frame is an offset and
bytes. Any protobuf implementation can stand at the other end.
"""

from dvla.v1 import sim_pb2, weights_pb2

from services.common.bundle import Buffer, memory
from services.common.errors import InvalidInput

_OFFSET, _DATA = 0x08, 0x12  # tags: field 1 and varint; field 2 and bytes
Piece = tuple[int, memoryview]
"""Offset and bytes of a frame."""


def encode_frame(offset: int, data: Buffer, field: int = 2) -> bytes:
    """A message that holds one frame in a field with a number below 16. One copy."""
    inner = b"".join((bytes((_OFFSET,)), _varint(offset), bytes((_DATA,)), _varint(len(data))))
    head = b"".join((_tag(field), _varint(len(inner) + len(data)), inner))
    return b"".join((head, memory(data)))


def decode_fetch(raw: bytes) -> weights_pb2.FetchResponse | Piece:
    """A message, or the offset and bytes of its frame where it is laid out as `encode_frame` does. No copy."""
    piece = frame_of(raw, 2)
    if piece is not None:
        return piece
    message = weights_pb2.FetchResponse.FromString(raw)
    return (message.frame.offset, memoryview(message.frame.data)) if message.HasField("frame") else message


def decode_session(raw: bytes) -> sim_pb2.SessionResponse | Piece:
    """The same for a simulator's session."""
    piece = frame_of(raw, 3)
    if piece is not None:
        return piece
    message = sim_pb2.SessionResponse.FromString(raw)
    return (message.frame.offset, memoryview(message.frame.data)) if message.HasField("frame") else message


def encode_session(item: sim_pb2.SessionResponse | bytes) -> bytes:
    """A message, or one that `encode_frame` has made already."""
    return item if isinstance(item, bytes) else item.SerializeToString()


def frame_of(raw: bytes, field: int) -> Piece | None:
    """The frame that a message holds in this field, if it is laid out as `encode_frame` does. No copy."""
    return _piece(memoryview(raw)) if raw[:1] == _tag(field) else None


def _tag(field: int) -> bytes:
    return bytes((field << 3 | 2,))


def _piece(raw: memoryview) -> Piece | None:
    try:
        size, at = _read_varint(raw, 1)
        if at + size != len(raw) or raw[at] != _OFFSET:
            return None
        offset, at = _read_varint(raw, at + 1)
        if raw[at] != _DATA:
            return None
        length, at = _read_varint(raw, at + 1)
    except IndexError:
        return None
    return (offset, raw[at:]) if at + length == len(raw) else None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(raw: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise InvalidInput("a frame has a number of more than 64 bits")
