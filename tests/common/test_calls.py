"""Errors, tokens, certificates and size limits on real calls of all four kinds."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from services.common import errors
from services.common.channels import MESSAGE_LIMIT, open_async_channel, open_channel, translated
from services.common.config import RoleConfig
from services.common.interceptors import CODES, DETAILS_LIMIT
from services.common.security import Security
from services.common.server import RoleServer
from services.common.telemetry import Telemetry
from tests.common.echo import KINDS, Behaviour, add_method, call, call_sync, healthy, serving, watch_health


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s"


def raising(error: Exception) -> Behaviour:
    def behave(request: bytes) -> bytes:
        raise error

    return behave


@pytest.mark.parametrize("kind", KINDS)
async def test_each_error_crosses_the_wire_as_its_own_class(address: str, kind: str) -> None:
    raised: list[Exception] = []
    async with (
        serving(RoleConfig(listen=address), lambda _: raising(raised[-1])(b"")),
        open_async_channel(address) as c,
    ):
        for error_class, code in CODES.items():
            raised.append(error_class("what was wrong: ü, 3 of 4\nand what to do"))
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(c, kind)
            assert failed.value.code() is code
            with pytest.raises(errors.DvlaError) as seen, translated("peer echo"):
                await call(c, kind)
            expected = errors.InvalidInput if error_class is errors.ConfigError else error_class
            assert type(seen.value) is expected
            assert str(seen.value) == "peer echo: what was wrong: ü, 3 of 4\nand what to do"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_exception_is_internal_and_logged(address: str, kind: str) -> None:
    async with serving(RoleConfig(listen=address), raising(KeyError("gone"))), open_async_channel(address) as channel:
        with capture_logs() as logs, pytest.raises(errors.DvlaError) as seen, translated("echo"):
            await call(channel, kind)
        assert type(seen.value) is errors.DvlaError
        assert "KeyError: 'gone'" in str(seen.value)
        [line] = [line for line in logs if line["event"] == "call failed"]
        assert line["log_level"] == "error"
        assert line["method"] == f"/echo/{kind}"
        assert isinstance(line["exc_info"], KeyError)
        assert await healthy(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_an_abort_of_a_servicer_keeps_its_own_code(address: str) -> None:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "offset 9 of 4")
        return b""

    server = RoleServer(RoleConfig(listen=address, drain_seconds=0), Telemetry("echo", "e0"))
    add_method(server.grpc, "unary_unary", refuse)
    await server.start()
    async with open_async_channel(address) as channel:
        with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel, "unary_unary")
    await server.stop()
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "offset 9 of 4")
    assert not logs


async def test_a_long_message_still_arrives_with_its_class(address: str) -> None:
    async with (
        serving(RoleConfig(listen=address), raising(errors.NotFound("→" * 100_000))),
        open_async_channel(address) as channel,
    ):
        with pytest.raises(errors.NotFound, match="→" * DETAILS_LIMIT), translated("echo"):
            await call(channel, "unary_unary")


async def test_silence_absence_and_unknown_methods_have_classes_too(address: str) -> None:
    async with open_async_channel(address) as channel:
        with pytest.raises(errors.Unavailable, match="echo"), translated("echo"):
            await call(channel, "unary_unary")
    server = RoleServer(RoleConfig(listen=address, drain_seconds=0), Telemetry("echo", "e0"))

    async def never(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    add_method(server.grpc, "unary_unary", never)
    await server.start()
    async with open_async_channel(address) as channel:
        with pytest.raises(errors.Unavailable, match="Deadline"), translated("echo"):
            await call(channel, "unary_unary", timeout=0.1)
        with pytest.raises(errors.Unsupported, match="Method not found"), translated("echo"):
            await call(channel, "stream_stream")
    await server.stop()


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.INTERNAL, "Internal error from Core", errors.Unavailable),  # broke while we wrote: ask again
        (grpc.StatusCode.INTERNAL, "KeyError: 'x'", errors.DvlaError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (20 vs. 16)", errors.InvalidInput),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "all sessions are taken", errors.Exhausted),
        (grpc.StatusCode.CANCELLED, "", errors.Unavailable),
        (grpc.StatusCode.DATA_LOSS, "", errors.DvlaError),
    ],
)
def test_every_status_has_a_class(code: grpc.StatusCode, details: str, expected: type[errors.DvlaError]) -> None:
    empty = grpc.aio.Metadata()
    with pytest.raises(errors.DvlaError, match="peer: ") as seen, translated("peer"):
        raise grpc.aio.AioRpcError(code, empty, empty, details)
    assert type(seen.value) is expected


@pytest.mark.parametrize("kind", ["unary_stream", "stream_stream"])
async def test_a_stream_that_is_given_up_is_cleaned_up_at_once(address: str, kind: str) -> None:
    cleaned = asyncio.Event()

    async def endless(request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            cleaned.set()

    server = RoleServer(RoleConfig(listen=address, drain_seconds=0), Telemetry("echo", "e0"))
    add_method(server.grpc, kind, endless)
    await server.start()
    async with open_async_channel(address) as channel:
        method: Any = getattr(channel, kind)(f"/echo/{kind}")
        stream = method(b"x") if kind == "unary_stream" else method()
        assert await stream.read() == b"x" * 100_000
        stream.cancel()
        await asyncio.wait_for(cleaned.wait(), 10)
    await server.stop()


# Tokens -------------------------------------------------------------------------------------------------------


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    (tmp_path / "token").write_text("s3cret\n")
    return str(tmp_path / "token")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_token_opens_all_kinds_of_calls_for_both_kinds_of_clients(
    address: str, token_file: str, kind: str
) -> None:
    config = RoleConfig(listen=address, token_file=token_file)
    async with serving(config), open_async_channel(address, config.security()) as channel:
        expected = await call(channel, kind, b"ping")
        assert expected[-1] == b"ping"
        with open_channel(address, config.security()) as sync:
            assert await asyncio.to_thread(call_sync, sync, kind, b"ping") == expected
        assert await healthy(channel) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("token", ["", "wrong", "s3cret2", "s3cre"])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_call_passes_without_the_token(address: str, token_file: str, kind: str, token: str) -> None:
    config = RoleConfig(listen=address, token_file=token_file)
    async with (
        serving(config, raising(AssertionError("reached"))),
        open_async_channel(address, Security(token=token)) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await call(channel, kind)
        with pytest.raises(errors.DvlaError, match="give --token-file"), translated("echo"):
            await call(channel, kind)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await healthy(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await watch_health(channel).read()


async def test_a_stream_without_the_token_ends_although_its_client_is_silent(address: str, token_file: str) -> None:
    async with serving(RoleConfig(listen=address, token_file=token_file)), open_async_channel(address) as channel:
        method: Any = channel.stream_stream("/echo/stream_stream")
        stream = method()
        assert await asyncio.wait_for(stream.code(), 10) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "header", [("authorization", "s3cret"), ("authorization", "bearer s3cret"), ("token", "s3cret")]
)
async def test_only_the_exact_header_counts(address: str, token_file: str, header: tuple[str, str]) -> None:
    async with serving(RoleConfig(listen=address, token_file=token_file)), open_async_channel(address) as channel:
        method: Any = channel.unary_unary("/echo/unary_unary")
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await method(b"x", metadata=(header,), timeout=10)
        assert await method(b"x", metadata=(("authorization", "Bearer s3cret"),), timeout=10) == b"x"


# Certificates -------------------------------------------------------------------------------------------------


def openssl(folder: Path, *arguments: str) -> None:
    try:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")


def make_ca(folder: Path, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        folder, "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", "/CN=ca"
    )


def make_pair(folder: Path, ca: str, name: str) -> dict[str, str]:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl(folder, "req", "-new", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial")
    openssl(folder, *sign, "-out", f"{name}.pem", "-days", "2", "-extfile", "san")
    return {"tls_cert": f"{folder}/{name}.pem", "tls_key": f"{folder}/{name}.key", "tls_ca": f"{folder}/{ca}.pem"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("certificates")
    make_ca(folder, "ca")
    make_ca(folder, "other")
    return {
        "server": make_pair(folder, "ca", "server"),
        "client": make_pair(folder, "ca", "client"),
        "stranger": make_pair(folder, "other", "stranger") | {"tls_ca": f"{folder}/ca.pem"},
    }


def tls_config(address: str, files: dict[str, str]) -> RoleConfig:
    return RoleConfig(listen=address, tls_cert=files["tls_cert"], tls_key=files["tls_key"], tls_ca=files["tls_ca"])


@pytest.mark.parametrize("kind", KINDS)
async def test_mutual_tls_lets_only_our_own_in(
    free_port: int, certificates: dict[str, dict[str, str]], kind: str
) -> None:
    address = f"127.0.0.1:{free_port}"
    trusts_only = {"tls_ca": certificates["client"]["tls_ca"]}
    async with serving(tls_config(address, certificates["server"])):
        async with open_async_channel(address, Security(**certificates["client"])) as channel:
            assert (await call(channel, kind, b"hello"))[-1] == b"hello"
        for security in (Security(), Security(**trusts_only), Security(**certificates["stranger"])):
            async with open_async_channel(address, security) as channel:
                with pytest.raises(errors.Unavailable), translated("echo"):
                    await call(channel, kind)


async def test_a_server_that_our_authority_did_not_sign_is_not_believed(
    free_port: int, certificates: dict[str, dict[str, str]]
) -> None:
    address = f"127.0.0.1:{free_port}"
    client = Security(**certificates["client"])
    async with serving(tls_config(address, certificates["stranger"])), open_async_channel(address, client) as channel:
        with pytest.raises(errors.Unavailable), translated("echo"):
            await call(channel, "unary_unary")


# Sizes --------------------------------------------------------------------------------------------------------


async def test_messages_of_all_sizes_up_to_the_limit_pass(address: str) -> None:
    async with serving(RoleConfig(listen=address)), open_async_channel(address) as channel:
        for size in (0, 5 * 1024 * 1024, MESSAGE_LIMIT):
            assert [len(reply) for reply in await call(channel, "stream_stream", bytes(size))] == [size]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_message_above_the_limit_is_refused_on_both_ways(address: str, kind: str) -> None:
    def behave(request: bytes) -> bytes:
        return request * 2

    async with serving(RoleConfig(listen=address), behave), open_async_channel(address) as channel:
        for size in (MESSAGE_LIMIT + 1, MESSAGE_LIMIT):  # too large to send; the reply to it too large to send back
            with pytest.raises(errors.InvalidInput, match=r"larger than max"), translated("echo"):
                await call(channel, kind, bytes(size))
        unlimited = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
        async with grpc.aio.insecure_channel(address, unlimited) as stranger:  # a client without our limits
            with pytest.raises(errors.InvalidInput, match=r"larger than max"), translated("echo"):
                await call(stranger, kind, bytes(MESSAGE_LIMIT + 1))
        assert (await call(channel, kind, b"still here"))[-1] == b"still herestill here"
