"""Nonsense from the wire: refused with a status that says so, the server lives, the current version stays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from dvla.v1 import common_pb2, weights_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.bundle import DTYPES, Version
from services.common.bundle_wire import manifest_from_proto, manifest_to_proto
from services.common.channels import open_channel
from services.common.delta import ENCODING
from services.common.errors import InvalidInput
from services.common.weights_client import WeightPublisher, fetch_once
from tests.weights.hosting import Host, check_stamp, stamped, stub_of

REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
)
U64 = st.integers(0, 2**64 - 1) | st.integers(0, 2048)
S64 = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 300)
TEXT = st.text(max_size=8) | st.sampled_from(["policy", "../policy", "__metadata__", "tied"])
VERSIONS = st.builds(common_pb2.Version, epoch=U64, update=U64)
TENSORS = st.builds(
    weights_pb2.WeightTensor,
    name=TEXT,
    dtype=st.sampled_from([*DTYPES, "object", ""]),
    shape=st.lists(S64, max_size=4),
    offset=U64,
    length=U64,
    xxh3=U64,
)
MANIFESTS = st.builds(
    weights_pb2.Manifest,
    model=TEXT,
    version=VERSIONS,
    tensors=st.lists(TENSORS, max_size=4),
    length=U64,
    layout=U64,
    metadata=st.dictionaries(TEXT, TEXT, max_size=2),
)
EXTENTS = st.builds(common_pb2.Extent, arena=TEXT, offset=U64, length=U64, generation=U64)
FRAMES = st.builds(common_pb2.Frame, offset=U64, data=st.binary(max_size=600))
PLAIN_MANIFEST = manifest_to_proto(stamped(1, 1, size=10)[0])
BEGINS = st.builds(
    weights_pb2.PublishBegin,
    manifest=MANIFESTS | st.just(PLAIN_MANIFEST),
    shm=st.none() | EXTENTS,
    delta=st.none() | st.builds(weights_pb2.Delta, base=VERSIONS, encoding=st.just(ENCODING) | TEXT, length=U64),
)
PUBLISHES = st.lists(
    st.builds(weights_pb2.PublishRequest, begin=BEGINS) | st.builds(weights_pb2.PublishRequest, frame=FRAMES),
    max_size=4,
)
FETCHES = st.builds(
    weights_pb2.FetchRequest,
    model=TEXT,
    version=st.none() | VERSIONS,
    offset=U64,
    have=st.none() | VERSIONS,
    locality=st.builds(
        common_pb2.Locality, boot_id=TEXT, probe_file=TEXT, transports=st.lists(st.integers(0, 9), max_size=3)
    ),
)
HOLDS = st.builds(weights_pb2.HoldRequest, model=TEXT, version=VERSIONS, holder=TEXT, seconds=st.floats(allow_nan=True))


ALL = (*REFUSALS, grpc.StatusCode.OK)


def outcome(call: Callable[[], object]) -> grpc.StatusCode:
    """How a call ended."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.fixture
def target(host: Host) -> str:
    address = host.start(durable_folder="")
    writer = WeightPublisher(address, "policy")
    writer.publish(*stamped(1, 0, size=10))
    writer.close()
    return address


def still_well(address: str) -> None:
    manifest, buffer = fetch_once(address, "policy")
    assert manifest.version == Version(1, 0)
    check_stamp(manifest, buffer)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(publishes=st.lists(PUBLISHES, max_size=3), fetch=FETCHES, hold=HOLDS)
def test_nonsense_is_refused(
    target: str,
    publishes: list[list[weights_pb2.PublishRequest]],
    fetch: weights_pb2.FetchRequest,
    hold: weights_pb2.HoldRequest,
) -> None:
    with stub_of(target) as stub:
        for publish in publishes:
            assert outcome(partial(stub.Publish, iter(publish), timeout=10)) in REFUSALS
        assert outcome(lambda: list(stub.Fetch(fetch, timeout=10))) in ALL
        assert outcome(lambda: stub.Hold(hold, timeout=10)) in ALL
    still_well(target)


@pytest.mark.parametrize("method", ["Publish", "Fetch", "Watch", "Fence", "Hold", "ListVersions"])
def test_bytes_that_are_no_messages_are_refused(target: str, method: str) -> None:
    path = f"/dvla.v1.WeightsService/{method}"
    with open_channel(target) as channel:
        call: Any = channel.stream_stream(path)
        for raw in (b"\xff" * 50, b"\x80\x04\x95pickle", b"\x0a\x7f", b"\x0a\xff\xff\xff\xff\x7f"):
            with pytest.raises(grpc.RpcError):
                list(call(iter([raw]), timeout=10))
    still_well(target)


def test_a_message_beyond_the_limit_is_refused(target: str) -> None:
    manifest, _ = stamped(1, 1, size=100_000)
    messages = [
        weights_pb2.PublishRequest(begin=weights_pb2.PublishBegin(manifest=manifest_to_proto(manifest))),
        weights_pb2.PublishRequest(frame=common_pb2.Frame(data=bytes(17 * 2**20))),
    ]
    with stub_of(target) as stub:
        assert outcome(lambda: stub.Publish(iter(messages), timeout=20)) == grpc.StatusCode.RESOURCE_EXHAUSTED
    still_well(target)


@given(MANIFESTS)
def test_a_manifest_is_right_or_refused(message: weights_pb2.Manifest) -> None:
    try:
        manifest = manifest_from_proto(message)
    except InvalidInput:
        return
    assert manifest_to_proto(manifest) == message
