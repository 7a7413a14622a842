"""The encoded delta to the newest version of each model: as the publisher sent it, else made when first asked for."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from services.common import delta
from services.common.bundle import Manifest, Version
from services.common.delta import DeltaRule
from services.common.errors import NotFound
from services.weights.draft import Reading

log = structlog.get_logger()


@dataclass(frozen=True)
class _Kept:
    version: Version
    base: Version
    data: bytes | None  # None: dense is cheaper


class Deltas:
    """One delta a model. Thread-safe; while one is being made, others who ask wait for it."""

    def __init__(self, rule: DeltaRule, open_version: Callable[[str, Version, str], Reading]) -> None:
        self._rule, self._open = rule, open_version
        self._kept: dict[str, _Kept] = {}
        self._making = threading.Lock()

    def put(self, manifest: Manifest, base: Version, data: bytes) -> None:
        """Keep what a publisher sent."""
        self._kept[manifest.model] = _Kept(manifest.version, base, data)

    def get(self, manifest: Manifest, have: Version) -> bytes | None:
        """The delta from `have` to this version; None if the reader is better served with the whole version."""
        if have >= manifest.version or not self._rule.allows(have, manifest.version):
            return None
        with self._making:
            kept = self._kept.get(manifest.model)
            if kept is None or (kept.version, kept.base) != (manifest.version, have):
                if kept is not None and kept.version > manifest.version:
                    return None
                made = self._make(manifest, have)
                if made is None:
                    return None
                kept = self._kept[manifest.model] = made
            return kept.data

    def size(self) -> int:
        """Bytes of all of them."""
        return sum(len(kept.data or b"") for kept in self._kept.values())

    def _make(self, manifest: Manifest, have: Version) -> _Kept | None:
        """None if the base is gone."""
        try:
            with (
                self._open(manifest.model, have, "delta") as old,
                self._open(manifest.model, manifest.version, "delta") as new,
            ):
                coded = None
                if old.manifest.layout.digest == manifest.layout.digest:
                    coded = delta.encode(manifest.layout, have, old.view, new.view, self._rule.density)
        except NotFound:
            return None
        if coded:
            log.info("delta", version=str(manifest.version), density=round(coded.density, 4), bytes=len(coded.data))
        return _Kept(manifest.version, have, coded.data if coded else None)
