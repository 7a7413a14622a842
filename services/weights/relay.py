"""Keeps a node's depot at the newest versions of an upstream server, each of which crosses the network once."""

import threading

import numpy as np
import numpy.typing as npt
import structlog

from services.common.bundle import Buffer, Manifest, Version
from services.common.client_fetch import Source
from services.common.client_subscribe import Follower, SubscriberStatus
from services.common.errors import InvalidInput, Superseded, Unavailable, Unsupported
from services.common.security import Security
from services.weights.depot import Depot
from services.weights.draft import Draft

DISCOVER_SECONDS = 2.0
"""How often the upstream server is asked for its models."""
log = structlog.get_logger()


class Relay:
    """Follows every model of the upstream server, one thread each. `run` blocks until `stop`."""

    def __init__(self, upstream: str, depot: Depot, *, name: str, security: Security, folder: str) -> None:
        self._upstream, self._depot, self._name = upstream, depot, name
        self._security, self._folder = security, folder
        self._source = Source(upstream, "", security, folder)
        self._followers: dict[str, Follower] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look for models and follow them. An upstream server that is away is waited for."""
        away = False
        try:
            while not self._stopped.is_set():
                try:
                    models = self._source.models()
                    away = False
                except Unavailable as error:
                    if not away and not self._stopped.is_set():
                        log.warning("upstream away", reason=str(error))
                    away, models = True, set()
                for model in sorted(models - self._followers.keys()):
                    self._follow(model)
                self._stopped.wait(DISCOVER_SECONDS)
        finally:
            for follower in self._followers.values():
                follower.close()

    def status(self) -> dict[str, SubscriberStatus]:
        """Where each model stands."""
        return {model: follower.status for model, follower in self._followers.items()}

    def stop(self) -> None:
        """Make `run` return, also while it waits for the upstream server."""
        self._stopped.set()
        self._source.close()

    def _follow(self, model: str) -> None:
        log.info("relaying", model=model, upstream=self._upstream)
        follower = Follower(
            self._upstream,
            model,
            DraftSink(self._depot, model),
            reader=self._name,
            security=self._security,
            folder=self._folder,
        )
        self._followers[model] = follower
        follower.start()


class DraftSink:
    """Writes a version into a depot and seals it there. A delta is asked for if the depot has a version."""

    def __init__(self, depot: Depot, model: str) -> None:
        self._depot, self._model = depot, model
        self._draft: Draft | None = None

    def base(self) -> Version | None:
        """The depot's newest version."""
        return self._depot.newest(self._model)

    def begin(self, manifest: Manifest) -> bool:
        """Start a draft; False if the depot has this version or a newer one."""
        self.abort()
        try:
            self._draft = self._depot.begin(manifest)
        except Superseded:
            return False
        return self._draft is not None

    def write(self, offset: int, data: Buffer) -> None:
        """Put a frame in its place."""
        self._begun().write(offset, data)

    def copy(self, source: npt.NDArray[np.uint8]) -> None:
        """Take the bytes from the upstream server's file on this node."""
        self._begun().copy(source)

    def patch(self, base: Version, data: Buffer) -> None:
        """Bring a copy of the base up to date."""
        draft = self._begun()
        try:
            draft.apply(base, data)
            draft.check()
        except (InvalidInput, Unsupported) as error:
            self.abort()
            raise InvalidInput(str(error)) from error

    def finish(self) -> None:
        """Verify and seal."""
        self._begun().seal()

    def abort(self) -> None:
        """End the draft."""
        if self._draft is not None:
            self._draft.abort()
            self._draft = None

    def _begun(self) -> Draft:
        if self._draft is None:
            raise ValueError("begin() comes first")
        return self._draft
