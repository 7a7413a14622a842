"""`WeightSubscriber`: a reader's end of the weight plane, a thread of its own that never holds up the caller.

It watches, fetches the newest version, verifies it and hands it over; a version older than the last one handed
over is never taken, whichever server offers it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import structlog
from dvla.v1 import weights_pb2

from services.common.bundle import Manifest, Version
from services.common.bundle_wire import version_from_proto, version_to_proto
from services.common.channels import translated
from services.common.client_fetch import Source
from services.common.errors import ConfigError, Unavailable
from services.common.security import Security
from services.common.sinks import BufferSink, Sink

CONNECT_SECONDS = 5.0
"""A server that does not answer within this time is given up for the next address."""
WATCH_SECONDS = 15.0
"""Deadline of one Watch stream. The server speaks every 10 s, so silence for so long means it hangs."""
RETURN_SECONDS = 60.0
"""After this time with another server than the first, the first is tried again."""
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0
log = structlog.get_logger()


@dataclass(frozen=True)
class SubscriberStatus:
    """newest: seen on a server. applied: handed over. seconds: what the last fetch and hand-over took."""

    newest: Version | None = None
    applied: Version | None = None
    seconds: float = 0.0
    versions: int = 0
    errors: int = 0
    last_error: str = ""
    address: str = ""
    transport: str = ""


class Follower:
    """Brings each newest version of a model into a sink. `addresses`: best first, such as relay, then root."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        model: str,
        sink: Sink,
        *,
        reader: str = "",
        security: Security | None = None,
        folder: str = "",
    ) -> None:
        self._addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self._addresses:
            raise ConfigError("no address of a weights server is given")
        self._model, self._sink, self._reader = model, sink, reader
        self._security, self._folder = security, folder
        self._status = SubscriberStatus()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._source: Source | None = None
        self._thread = threading.Thread(target=self._run, name=f"weights-{model}", daemon=True)

    @property
    def status(self) -> SubscriberStatus:
        """Where it stands now."""
        return self._status

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait(self, minimum: Version | None = None, seconds: float = 60.0) -> Version | None:
        """Wait until a version, at least this one, has been handed over; returns what has been when time is over."""

        def there() -> bool:
            applied = self._status.applied
            return applied is not None and (minimum is None or applied >= minimum)

        with self._changed:
            self._changed.wait_for(there, seconds)
        return self._status.applied

    def close(self, seconds: float = 10.0) -> None:
        """Stop the thread and wait for it, but no longer than this."""
        self._stopped.set()
        source = self._source
        if source is not None:
            source.close()
        if self.running:
            self._thread.join(seconds)

    def _run(self) -> None:
        turn, pause = 0, _FIRST_PAUSE
        while not self._stopped.is_set():
            before = self._status.versions
            try:
                self._follow(self._addresses[turn], None if turn == 0 else time.monotonic() + RETURN_SECONDS)
                turn = 0
            except Exception as error:  # noqa: BLE001 - the thread must live; the error is logged, counted and shown
                if self._stopped.is_set():
                    break
                self._failed(self._addresses[turn], error)
                if isinstance(error, Unavailable):
                    turn = (turn + 1) % len(self._addresses)
                pause = _FIRST_PAUSE if self._status.versions > before else min(2 * pause, _LAST_PAUSE)
                self._stopped.wait(pause)

    def _follow(self, address: str, until: float | None) -> None:
        """Watch and fetch from one server, until the time is over or something fails."""
        source = self._source = Source(address, self._model, self._security, self._folder)
        try:
            source.connect(CONNECT_SECONDS)
            self._set(address=address)
            while not self._stopped.is_set() and (until is None or time.monotonic() < until):
                if not self._watch(source):
                    raise Unavailable(f"weights server {address} was silent for {WATCH_SECONDS} s")
        finally:
            self._source = None
            source.close()

    def _watch(self, source: Source) -> int:
        """One Watch stream; returns how many messages came."""
        request = weights_pb2.WatchRequest(
            model=self._model, have=version_to_proto(self._status.applied), reader=self._reader
        )
        call = source.stub.Watch(request, timeout=WATCH_SECONDS)
        messages = 0
        try:
            for message in _until_deadline(call, f"weights server {source.address}"):
                messages += 1
                source.prune()
                self._news(source, version_from_proto(message.newest))
        finally:
            call.cancel()
        return messages

    def _news(self, source: Source, newest: Version | None) -> None:
        if newest is None:
            return
        seen, applied = self._status.newest, self._status.applied
        self._set(newest=newest if seen is None else max(seen, newest))
        if applied is not None and newest <= applied:
            return
        started = time.monotonic()
        gate = _Newer(self._sink, applied)
        if source.fetch(None, gate, self._stopped.is_set) and gate.manifest is not None:
            status = self._status
            self._set(
                applied=gate.manifest.version,
                newest=max(status.newest or newest, gate.manifest.version),
                seconds=time.monotonic() - started,
                versions=status.versions + 1,
                transport=source.transport,
            )

    def _failed(self, address: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        log.warning("weights not received", model=self._model, server=address, error=text)
        self._set(errors=self._status.errors + 1, last_error=text)

    def _set(self, **fields: object) -> None:
        with self._changed:
            self._status = replace(self._status, **fields)  # type: ignore[arg-type]
            self._changed.notify_all()


def _until_deadline(call: Any, peer: str) -> Iterator[weights_pb2.WatchResponse]:
    """The messages of a stream; that its deadline ends it is no error."""
    with translated(peer):
        try:
            yield from call
        except grpc.RpcError:
            if call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise


class _Newer:
    """Passes on to a sink only what is newer than the version applied."""

    def __init__(self, sink: Sink, applied: Version | None) -> None:
        self._sink, self._applied = sink, applied
        self.manifest: Manifest | None = None
        self.base, self.write, self.copy, self.patch = sink.base, sink.write, sink.copy, sink.patch
        self.finish, self.abort = sink.finish, sink.abort

    def begin(self, manifest: Manifest) -> bool:
        if self._applied is not None and manifest.version <= self._applied:
            return False
        self.manifest = manifest
        return self._sink.begin(manifest)


class WeightSubscriber(Follower):
    """Calls `on_version(manifest, buffer)` in its thread for each newest version; uint8 [length], verified.

    The buffer may be used until the function returns. If it raises, the error is counted and shown in the
    status, and the newest version is tried again.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        model: str,
        on_version: Callable[[Manifest, npt.NDArray[np.uint8]], None],
        *,
        reader: str = "",
        security: Security | None = None,
        folder: str = "",
    ) -> None:
        super().__init__(addresses, model, BufferSink(on_version), reader=reader, security=security, folder=folder)
