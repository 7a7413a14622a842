"""One way to run a role: a gRPC server with health, status, errors as codes, and a graceful drain on SIGTERM."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog
import uvloop
from dvla.v1 import common_pb2, role_pb2, role_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from services.common.channels import MESSAGE_LIMIT
from services.common.config import RoleConfig, report
from services.common.errors import ConfigError, DvlaError
from services.common.interceptors import ErrorInterceptor, TokenInterceptor
from services.common.process import boot_id
from services.common.security import require_protected
from services.common.telemetry import BUSY, PrometheusCollector, Spans, Telemetry

log = structlog.get_logger()

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two servers on one port is an error, not load balancing
)

CANCEL_SECONDS = 20.0
"""Time that a background task gets to end once it is cancelled."""

_open: "set[RoleServer]" = set()


class RoleServicer(role_pb2_grpc.RoleServiceServicer):
    """Serves a `Telemetry`."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    async def GetStatus(
        self, request: role_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> role_pb2.GetStatusResponse:
        """The status now."""
        telemetry = self._telemetry
        lanes = []
        for lane in list(telemetry.lanes.values()):
            seconds = lane.seconds()
            busy = seconds.pop(BUSY, 0.0)
            total = busy + sum(seconds.values())
            lanes.append(
                common_pb2.LaneStatus(name=lane.name, busy_seconds=busy, total_seconds=total, idle_seconds=seconds)
            )
        return role_pb2.GetStatusResponse(
            role=telemetry.role,
            name=telemetry.name,
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - telemetry.started,
            lanes=lanes,
            metrics=telemetry.metrics(),
            facts=dict(telemetry.facts),
        )

    async def GetSpans(
        self, request: role_pb2.GetSpansRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> role_pb2.GetSpansResponse:
        """What the lanes did when."""
        lanes = [
            (lane.name, lane.spans(request.first.get(lane.name, 0))) for lane in list(self._telemetry.lanes.values())
        ]
        return role_pb2.GetSpansResponse(
            pid=os.getpid(),
            boot_id=boot_id(),
            lanes=[_spans(name, spans) for name, spans in lanes],
            monotonic_seconds=time.monotonic(),  # after the spans were read: it ends the last of each lane
            wall_seconds=time.time(),
        )


def _spans(name: str, spans: Spans) -> role_pb2.LaneSpans:
    names = list(dict.fromkeys(state for _, state in spans.begins))
    index = {state: number for number, state in enumerate(names)}
    return role_pb2.LaneSpans(
        name=name,
        first=spans.first,
        begins=[begin for begin, _ in spans.begins],
        states=[index[state] for _, state in spans.begins],
        names=names,
    )


class RoleServer:
    """The server of one role. Add servicers to `grpc`, then `start`; `stop` drains."""

    def __init__(self, config: RoleConfig, telemetry: Telemetry) -> None:
        security = config.security()
        require_protected(config.listen, security, config.insecure)
        interceptors: list[grpc.aio.ServerInterceptor] = [ErrorInterceptor()]
        if security.token:
            interceptors.insert(0, TokenInterceptor(security.token))
        self.grpc = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self.health = health.aio.HealthServicer()
        self._config, self._telemetry = config, telemetry
        self._credentials = security.server_credentials()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        role_pb2_grpc.add_RoleServiceServicer_to_server(RoleServicer(telemetry), self.grpc)
        if config.reflection:
            reflection.enable_server_reflection((reflection.SERVICE_NAME,), self.grpc)
        _open.add(self)

    async def start(self, serving: bool = True) -> None:
        """Bind and serve; raises ConfigError if the address cannot be bound."""
        try:
            self._bind(self._config.listen)
            self._start_metrics(self._config.metrics_host, self._config.metrics_port)
        except ConfigError:
            await self.stop()
            raise
        await self.grpc.start()
        await self.serving(serving)
        log.info("listening", address=self._config.listen, pid=os.getpid())

    def _bind(self, listen: str) -> None:
        local = listen.startswith("unix:")
        if local:
            remove_stale_socket(listen.removeprefix("unix:"))
        try:
            if self._credentials and not local:
                self.grpc.add_secure_port(listen, self._credentials)
            else:
                self.grpc.add_insecure_port(listen)
        except RuntimeError as error:
            reasons = ["it is no address of this machine", "another process uses it", "its folder does not exist"]
            if self._credentials:
                reasons.append(f"{self._config.tls_cert} and {self._config.tls_key} are no valid PEM pair")
            raise ConfigError(
                f"listen = {listen!r} cannot be bound: {', or '.join(reasons)}; "
                "choose another --listen, such as 127.0.0.1:50051 or unix:/run/dvla.sock"
            ) from error

    def _start_metrics(self, host: str, port: int) -> None:
        if not port:
            return
        registry = CollectorRegistry()
        registry.register(PrometheusCollector(self._telemetry))
        try:
            start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics endpoint {host}:{port} cannot be bound: {error.strerror}; choose another --metrics-port"
            ) from error

    async def serving(self, yes: bool) -> None:
        """Set the health status of the whole server."""
        status = health_pb2.HealthCheckResponse
        await self.health.set("", status.SERVING if yes else status.NOT_SERVING)

    async def stop(self) -> None:
        """Stop accepting, give calls in flight the drain time, then cancel them."""
        await self.health.enter_graceful_shutdown()
        await self.grpc.stop(self._config.drain_seconds)
        _open.discard(self)


def remove_stale_socket(path: str) -> None:
    """Remove a socket file that nobody listens on; raises ConfigError if somebody does, or if it is no socket."""
    if len(path.encode()) > 100:
        raise ConfigError(f"socket path {path!r} is longer than 100 bytes; choose a shorter folder")
    if not Path(path).exists():
        return
    if not Path(path).is_socket():
        raise ConfigError(f"listen = 'unix:{path}' is a file that is no socket; choose another --listen")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"listen = 'unix:{path}' cannot be used: {error.strerror}; choose another") from error
    raise ConfigError(f"listen = 'unix:{path}' is in use by a running process; stop it or choose another --listen")


async def until_stopped(*tasks: Awaitable[Any]) -> None:
    """Wait for SIGTERM or SIGINT. A background task that ends before that ends the role: by its error, if any."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    waiter = asyncio.ensure_future(stop.wait())
    running = [asyncio.ensure_future(task) for task in tasks]
    done, pending = await asyncio.wait([waiter, *running], return_when=asyncio.FIRST_COMPLETED)
    while pending:  # again: on Python 3.11 a library's wait_for can swallow a cancellation
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
    for task in done - {waiter}:
        task.result()
    for task in running:
        if not task.cancelled() and task.exception() is not None:
            log.error("failed while stopping", exc_info=task.exception())


def run_role(main: Callable[[], Awaitable[None]], config: RoleConfig) -> None:
    """Run a role's coroutine on uvloop. Failure: one clear line, a non-zero exit code, a trace only with debug."""
    configure_logging(config.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_stopping_servers(main))
    except DvlaError as error:
        raise SystemExit(report(error, config.debug)) from error


async def _stopping_servers(main: Callable[[], Awaitable[None]]) -> None:
    try:
        await main()
    finally:  # left to the garbage collector, a server complains about the closed loop or waits for ever
        await asyncio.gather(*(server.stop() for server in _open))


def configure_logging(level: str) -> None:
    """Structured lines on stderr: time, level, event, fields."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f"),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
