"""A weight plane in memory, with the publisher's rules: epochs are fenced, versions only grow."""

import threading
from collections.abc import Mapping

from services.common.bundle import Buffer, Manifest, Version, as_bytes, verify, views
from services.common.errors import Superseded, Unavailable
from services.common.spec import Array
from services.common.staging import Stage


class FakeWeights:
    """Keeps every sealed version: manifest and bytes. `gate` closed makes publishes wait."""

    def __init__(self) -> None:
        self.sealed: dict[Version, tuple[Manifest, bytes]] = {}
        self.fenced = 0
        self.away = 0
        self.gate = threading.Event()
        self.gate.set()
        self.publishes = 0
        self._last: tuple[Manifest, Buffer] | None = None

    @property
    def newest(self) -> Version | None:
        return max(self.sealed, default=None)

    def arrays(self, version: Version) -> Mapping[str, Array]:
        manifest, data = self.sealed[version]
        return views(manifest.layout, data)

    def fence(self, epoch: int) -> Version | None:
        if epoch < self.fenced:
            raise Superseded(f"epoch {self.fenced} was fenced")
        self.fenced = epoch
        return self.newest

    def stage(self, length: int) -> Stage | None:
        return Stage(None, length)

    def publish(self, manifest: Manifest, data: Stage) -> Version:
        return self._publish(manifest, data.buffer)

    def _publish(self, manifest: Manifest, buffer: Buffer) -> Version:
        self.publishes += 1
        self._last = (manifest, buffer)
        self.gate.wait(10)
        if self.away:
            self.away -= 1
            raise Unavailable("the weights server is away")
        if manifest.version.epoch < self.fenced:
            raise Superseded(f"epoch {self.fenced} was fenced")
        verify(manifest, buffer)
        newest = self.newest
        assert newest is None or manifest.version >= newest
        self.sealed[manifest.version] = (manifest, as_bytes(buffer, manifest.length).tobytes())
        return manifest.version

    def ensure(self) -> bool:
        if self._last is None or (self.newest is not None and self.newest >= self._last[0].version):
            return False
        self._publish(*self._last)
        return True

    def close(self) -> None:
        """Nothing to close."""
