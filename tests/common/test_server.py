"""A role binds or says why not, drains on a signal, and ends with one clear line when it fails."""

import asyncio
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from dvla.v1 import role_pb2, role_pb2_grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.channels import open_async_channel, translated
from services.common.config import RoleConfig
from services.common.errors import ConfigError, Unavailable
from services.common.server import RoleServer
from services.common.telemetry import BUSY, Telemetry
from tests.common.echo import call, healthy, serving, watch_health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


# Binding ------------------------------------------------------------------------------------------------------


async def refused(config: RoleConfig) -> str:
    with pytest.raises(ConfigError) as error:
        await RoleServer(config, Telemetry("echo", "e1")).start()
    return str(error.value)


async def test_a_port_in_use_is_refused(free_port: int) -> None:
    config = RoleConfig(listen=f"127.0.0.1:{free_port}")
    async with serving(config):
        assert f"listen = '127.0.0.1:{free_port}' cannot be bound" in await refused(config)


async def test_a_socket_in_use_is_refused_and_goes_on(path: Path) -> None:
    config = RoleConfig(listen=f"unix:{path}")
    async with serving(config), open_async_channel(config.listen) as channel:
        assert "is in use by a running process" in await refused(config)
        assert await healthy(channel) == SERVING


async def test_a_stale_socket_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    config = RoleConfig(listen=f"unix:{path}")
    async with serving(config), open_async_channel(config.listen) as channel:
        assert await healthy(channel) == SERVING


async def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.write_text("precious")
    assert "is a file that is no socket" in await refused(RoleConfig(listen=f"unix:{path}"))
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("unix:/nowhere/at/all/s", "its folder does not exist"),
        ("unix:/" + "x" * 120, "longer than 100 bytes"),
        ("192.0.2.1:50051", "cannot be bound: it is no address of this machine"),
        ("0.0.0.0:0", "reachable from other machines without any protection"),
    ],
)
async def test_an_impossible_address_is_refused(listen: str, message: str) -> None:
    assert message in await refused(RoleConfig(listen=listen, insecure="192" in listen))


async def test_a_broken_certificate_is_refused_by_name(tmp_path: Path, free_port: int) -> None:
    (tmp_path / "c.pem").write_text("not a certificate")
    config = RoleConfig(
        listen=f"127.0.0.1:{free_port}", tls_cert=f"{tmp_path}/c.pem", tls_key=f"{tmp_path}/c.pem", tls_ca=""
    )
    assert "c.pem" in await refused(config)


# What every role serves ---------------------------------------------------------------------------------------


async def test_status_shows_lanes_metrics_and_facts(path: Path) -> None:
    telemetry = Telemetry("echo", "e0", facts={"transport": "grpc: asked for"})
    telemetry.lane("sampling", "weights").set(BUSY)
    telemetry.count("episodes", 3)
    server = RoleServer(RoleConfig(listen=f"unix:{path}", drain_seconds=0), telemetry)
    await server.start()
    async with open_async_channel(f"unix:{path}") as channel:
        stub: Any = role_pb2_grpc.RoleServiceStub(channel)
        status = await stub.GetStatus(role_pb2.GetStatusRequest(), timeout=10)
    await server.stop()
    assert (status.role, status.name, status.pid) == ("echo", "e0", os.getpid())
    assert dict(status.metrics) == {"episodes": 3}
    assert dict(status.facts) == {"transport": "grpc: asked for"}
    [lane] = status.lanes
    assert lane.name == "sampling"
    assert list(lane.idle_seconds) == ["weights"]
    assert lane.total_seconds == pytest.approx(lane.busy_seconds + lane.idle_seconds["weights"])
    assert 0 < lane.busy_seconds <= status.uptime_seconds


async def test_health_follows_the_role_on_check_and_watch(path: Path) -> None:
    server = RoleServer(RoleConfig(listen=f"unix:{path}", drain_seconds=0.2), Telemetry("echo", "e0"))
    await server.start(serving=False)
    async with open_async_channel(f"unix:{path}") as channel:
        assert await healthy(channel) == NOT_SERVING
        watch = watch_health(channel)
        assert (await watch.read()).status == NOT_SERVING
        await server.serving(True)
        assert (await watch.read()).status == SERVING
        assert await healthy(channel) == SERVING
        stopping = asyncio.create_task(server.stop())
        assert (await watch.read()).status == NOT_SERVING
        await stopping
        with pytest.raises(Unavailable), translated("echo"):
            await healthy(channel)


@pytest.mark.parametrize("on", [True, False])
async def test_reflection_is_served_only_when_asked_for(path: Path, on: bool) -> None:
    async with serving(RoleConfig(listen=f"unix:{path}", reflection=on)), open_async_channel(f"unix:{path}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        reply = await stream.read() if on else await stream.code()
    if on:
        assert reply.list_services_response.service[0].name == "grpc.reflection.v1alpha.ServerReflection"
    else:
        assert reply is grpc.StatusCode.UNIMPLEMENTED


async def test_metrics_are_served_over_http_and_a_taken_port_is_refused(path: Path, free_port: int) -> None:
    config = RoleConfig(listen=f"unix:{path}", metrics_port=free_port)
    server = RoleServer(config, Telemetry("echo", "e0"))
    server._telemetry.gauge("queue", 4)
    await server.start()
    url = f"http://127.0.0.1:{free_port}/metrics"
    with await asyncio.to_thread(urllib.request.urlopen, url, timeout=10) as page:
        assert 'dvla_metric{name="queue",replica="e0",role="echo"} 4.0' in page.read().decode()
    other = RoleConfig(listen=f"unix:{path}2", metrics_port=free_port)
    assert "choose another --metrics-port" in await refused(other)
    await server.stop()


# The life of a process ----------------------------------------------------------------------------------------


@asynccontextmanager
async def role(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.common.toy_role", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"serving\n"


async def ending(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Exit code, what it printed, and its error lines without its log lines."""
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    lines = [line for line in err.decode().splitlines() if not line.startswith("timestamp=")]
    return process.returncode, out.decode(), "\n".join(lines)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT], ids=lambda sig: sig.name)
async def test_a_signal_drains_a_role_and_ends_it_with_zero(path: Path, sig: signal.Signals) -> None:
    async with (
        role("--listen", f"unix:{path}", "--drain-seconds", "2") as process,
        open_async_channel(f"unix:{path}") as channel,
    ):
        await ready(process)
        watch = watch_health(channel)
        assert (await watch.read()).status == SERVING
        method: Any = channel.unary_stream("/echo/unary_stream")
        in_flight, too_long = method(b"0.5", timeout=60), method(b"60", timeout=90)
        assert [await in_flight.read(), await too_long.read()] == [b"started", b"started"]
        process.send_signal(sig)
        assert (await watch.read()).status == NOT_SERVING
        async with open_async_channel(f"unix:{path}") as late:
            with pytest.raises(Unavailable), translated("toy"):
                await call(late, "unary_stream", b"0")
        assert await in_flight.read() == b"finished"
        assert await ending(process) == (0, "drained\n", "")
        with pytest.raises(Unavailable), translated("toy"):
            await too_long.read()


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("failed", 1, "error: the disk is full; free some space"),
        ("misconfigured", 2, "error: model = 'x' is unknown; choose y"),
    ],
)
async def test_a_failing_background_task_ends_the_role_with_one_line(
    path: Path, what: str, code: int, line: str
) -> None:
    async with role("--listen", f"unix:{path}", "--background", what, "--drain-seconds", "0") as process:
        await ready(process)
        assert await ending(process) == (code, "", line)


async def test_debug_adds_the_stack_trace(path: Path) -> None:
    async with role("--listen", f"unix:{path}", "--background", "failed", "--drain-seconds", "0", "--debug") as process:
        code, _, lines = await ending(process)
    assert code == 1
    assert "Traceback" in lines
    assert lines.endswith("error: the disk is full; free some space")


async def test_a_bug_in_a_background_task_ends_the_role_with_its_trace(path: Path) -> None:
    async with role("--listen", f"unix:{path}", "--background", "bug", "--drain-seconds", "0") as process:
        code, _, lines = await ending(process)
    assert code == 1
    assert lines.endswith("ZeroDivisionError: a bug")


async def test_a_background_task_that_is_done_ends_the_role_in_peace(path: Path) -> None:
    async with role("--listen", f"unix:{path}", "--background", "end", "--drain-seconds", "0") as process:
        assert await ending(process) == (0, "serving\ndrained\n", "")


async def test_an_open_port_ends_the_role_with_code_two() -> None:
    async with role("--listen", "0.0.0.0:0") as process:
        code, out, line = await ending(process)
    assert (code, out) == (2, "")
    assert line.startswith("error: listen = '0.0.0.0:0' is reachable from other machines")
    assert "\n" not in line
