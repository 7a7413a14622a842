"""Bulk frames: the same bytes as the protobuf messages, read without copies, in any legal layout."""

import pytest
from dvla.v1 import common_pb2, sim_pb2, weights_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidInput
from services.common.frame_wire import decode_fetch, decode_session, encode_frame, encode_session

OFFSETS = st.integers(0, 2**64 - 1) | st.integers(0, 300)


@given(OFFSETS, st.binary(max_size=300))
def test_what_is_written_is_what_protobuf_reads_and_the_other_way_round(offset: int, data: bytes) -> None:
    raw = encode_frame(offset, data)
    for message in (weights_pb2.FetchResponse.FromString(raw), weights_pb2.PublishRequest.FromString(raw)):
        assert (message.frame.offset, message.frame.data) == (offset, data)
    plain = weights_pb2.FetchResponse(frame=common_pb2.Frame(offset=offset, data=data)).SerializeToString()
    for form in (raw, plain):
        piece = decode_fetch(form)
        assert isinstance(piece, tuple)
        assert (piece[0], bytes(piece[1])) == (offset, data)


def test_other_messages_come_through() -> None:
    begin = weights_pb2.FetchResponse(begin=weights_pb2.FetchBegin(manifest=weights_pb2.Manifest(model="m")))
    assert decode_fetch(begin.SerializeToString()) == begin


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda rest: b"\x12" + rest))
def test_nonsense_is_refused_as_protobuf_does(raw: bytes) -> None:
    try:
        decode_fetch(raw)
    except (DecodeError, InvalidInput):
        return
    weights_pb2.FetchResponse.FromString(raw)


def test_a_frame_may_be_large() -> None:
    data = bytes(range(256)) * 4096
    piece = decode_fetch(encode_frame(2**40, data))
    assert isinstance(piece, tuple)
    assert piece[1].nbytes == len(data)
    with pytest.raises(TypeError):
        piece[1][0] = 1  # a view of what came, not to be written to


@given(OFFSETS, st.binary(max_size=300))
def test_a_session_carries_the_same_frames_in_another_field(offset: int, data: bytes) -> None:
    frame = sim_pb2.SessionResponse(frame=common_pb2.Frame(offset=offset, data=data))
    raw = encode_frame(offset, data, field=3)
    assert sim_pb2.SessionResponse.FromString(raw) == frame
    assert encode_session(raw) is raw
    for form in (raw, encode_session(frame)):
        piece = decode_session(form)
        assert isinstance(piece, tuple)
        assert (piece[0], bytes(piece[1])) == (offset, data)
    pong = sim_pb2.SessionResponse(pong=sim_pb2.Pong(nonce=offset))
    assert decode_session(encode_session(pong)) == pong
