"""Versions with their bytes: the library's rules, the files and the archive put together. Thread-safe.

draft = depot.begin(manifest)       None if it is here already; or depot.adopt(manifest, file, generation)
draft.write(offset, data) ...       frames in any order, or draft.apply(base, delta)
draft.seal()                        verified, readable, then durable; else draft.abort()

with depot.open(model) as reading:  the newest; its file cannot be rewritten inside the block
    reading.view[offset : offset + length]
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.bundle import Manifest, Version, verify
from services.common.delta import DeltaRule
from services.common.errors import DvlaError, Exhausted, InvalidInput, Unsupported
from services.common.flatfile import FlatFile
from services.weights import safefile
from services.weights.deltas import Deltas
from services.weights.draft import Draft, Reading
from services.weights.durable import Archive
from services.weights.files import FilePool
from services.weights.library import Entry, Library

log = structlog.get_logger()


@dataclass(frozen=True)
class Info:
    """One line of the list of versions."""

    model: str
    version: Version
    state: str
    length: int
    age_seconds: float
    readers: tuple[str, ...]


class Depot:
    """All versions of one weights process."""

    def __init__(
        self,
        keep: int,
        pool: FilePool,
        archive: Archive | None = None,
        rule: DeltaRule = DeltaRule(),  # noqa: B008
    ) -> None:
        self._library = Library(keep, time.monotonic)
        self.deltas = Deltas(rule, self.open)
        self._pool, self._archive = pool, archive
        self._lock = threading.RLock()  # library and pool
        self._sealing = threading.Lock()  # one seal or fence at a time
        self._disk = ThreadPoolExecutor(1, "disk", lambda: os.setpriority(os.PRIO_PROCESS, 0, 10))
        self._sync = ThreadPoolExecutor(1, "sync")
        self._syncing: set[str] = set()
        self._durable: dict[str, Version] = {}
        self._listeners: list[Callable[[str], None]] = []

    @property
    def folder(self) -> Path:
        """The folder of the shared files."""
        return self._pool.folder

    def restore(self) -> None:
        """Bring back fences and the newest stored version of each model that is whole."""
        if self._archive is None:
            return
        for model in self._archive.models():
            for manifest, path in self._archive.stored(model):
                try:
                    self._restore(manifest, path)
                except InvalidInput as error:
                    self._archive.set_aside(path, error)
                    continue
                log.info("restored", model=model, version=str(manifest.version))
                break
        for model, epoch in self._archive.fences().items():  # after the versions, which are of older epochs
            self._library.fence(model, epoch)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener(model)` after every seal, in the thread that sealed."""
        self._listeners.append(listener)

    def fence(self, model: str, epoch: int) -> Version | None:
        """Refuse older epochs from now on, also after a restart; returns the newest version.

        After it returns no version of an older epoch appears any more.
        """
        with self._sealing:
            with self._lock:
                before = self._library.fenced(model)
                newest = self._library.fence(model, epoch)
            if self._archive and epoch > before:
                self._archive.save_fence(model, epoch)
            return newest

    def begin(self, manifest: Manifest) -> Draft | None:
        """Start a version; None if it is the newest sealed one already and durable.

        Raises Superseded if its epoch or version is too old, Exhausted if readers hold all files.
        """
        entry = self._enter(manifest, lambda: self._pool.take(manifest.length))
        if entry is None:
            return None
        try:
            self._pool[entry.slot].file.start(manifest.length)  # takes seconds for gigabytes: readers must not wait
        except DvlaError:
            with self._lock:
                self._library.drop(entry)
                self._pool.discard(entry.slot)
            raise
        return Draft(self, entry, self._pool.view(entry.slot), whole=False)

    def adopt(self, manifest: Manifest, file: FlatFile, generation: int) -> Draft | None:
        """Start a version that lies in a publisher's file, locked for reading; it is closed when not needed any more.

        Returns and raises as `begin`; also raises Exhausted if the budget has no room for it.
        """
        try:
            entry = self._enter(manifest, lambda: self._pool.adopt(file, generation))
        except DvlaError:
            file.close()
            raise
        if entry is None:
            file.close()
            return None
        return Draft(self, entry, self._pool.view(entry.slot), whole=True)

    def newest(self, model: str) -> Version | None:
        """The newest sealed version, if any."""
        with self._lock:
            return self._library.newest(model)

    def open(self, model: str, version: Version | None = None, reader: str = "") -> Reading:
        """A sealed version, by default the newest, locked for reading; raises NotFound."""
        with self._lock:
            entry = self._library.find(model, version)
            slot = self._pool[entry.slot]
            length = entry.manifest.length
            file = FlatFile.open_shared(self._pool.folder, slot.file.name, slot.generation, length, 0.0)
            entry.readers.append(reader)
            view = self._pool.view(entry.slot)
        return Reading(entry, file, slot.generation, view, lambda: entry.readers.remove(reader))

    def base(self, manifest: Manifest, base: Version) -> Reading:
        """The newest sealed version, if it is `base`, which a delta to `manifest` needs; raises Unsupported."""
        newest = self.newest(manifest.model)
        if newest != base:
            raise Unsupported(f"the delta's base is {base}, but the newest version here is {newest}; send it whole")
        return self.open(manifest.model, base, "delta")

    def hold(self, model: str, version: Version, holder: str, seconds: float) -> None:
        """Keep a version readable for so long; 0 lets go."""
        with self._lock:
            self._library.hold(model, version, holder, seconds)
            self._free(self._library.retire())

    def versions(self) -> list[Info]:
        """Every version of every model, newest first."""
        with self._lock:
            return [
                Info(
                    model=entry.manifest.model,
                    version=entry.version,
                    state=entry.state,
                    length=entry.manifest.length,
                    age_seconds=self._library.age(entry),
                    readers=tuple(sorted({*entry.holds, *entry.readers})),
                )
                for entry in self._library.entries()
            ]

    def tend(self, seconds: float = 30.0) -> list[str]:
        """Retire what nobody holds any more; words on each file that readers lock for longer than that."""
        with self._lock:
            self._free(self._library.retire())
            self._pool.tidy()
            return list(self._pool.blocked(seconds))

    def reserved(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return self._pool.reserved()

    def close(self) -> None:
        """Remove all files and give the archive's folder back."""
        self._disk.shutdown()
        self._sync.shutdown()
        with self._sealing, self._lock:
            self._pool.close()
            if self._archive:
                self._archive.close()

    def durable(self, model: str) -> Version | None:
        """The newest version of a model that survives a restart."""
        return self._durable.get(model)

    def seal(self, entry: Entry) -> Version:
        """For `Draft.seal`, which has verified the bytes."""
        manifest = entry.manifest
        with self._sealing, self._lock:
            if entry.state != "writing":
                raise ValueError(f"version {entry.version} has been aborted or sealed before")
            if self._library.admit(manifest):  # else another try of the same publish was faster
                self._show(entry)
        for listener in self._listeners:
            listener(manifest.model)
        self.keep(manifest.model, manifest.version)
        return manifest.version

    def keep(self, model: str, version: Version) -> None:
        """Returns when this version or a newer one is stored; raises Exhausted if the disk refuses it.

        Versions appear before they are durable, so that the disk holds nobody up. Should both this server and the
        publisher die in between, the next learner's epoch makes its versions the newer ones all the same.
        """
        if self._archive is not None:
            self._disk.submit(self._keep, self._archive, model, version).result()

    def abort(self, entry: Entry) -> None:
        """For `Draft.abort`."""
        with self._lock:
            if entry.state == "writing":
                entry.state = "retired"
                self._library.drop(entry)
                self._pool.release(entry.slot)

    def _keep(self, archive: Archive, model: str, version: Version) -> None:
        durable = self._durable.get(model)
        if durable is not None and durable >= version:
            return
        with self.open(model, reader="disk") as reading:
            archive.save(reading.manifest, reading.view)
            self._durable[model] = reading.manifest.version
        if model not in self._syncing:
            self._syncing.add(model)
            self._sync.submit(self._bring_to_disk, archive, model)

    def _bring_to_disk(self, archive: Archive, model: str) -> None:
        self._syncing.discard(model)  # before the sync: a version that comes during it wants one more
        try:
            archive.sync(model)
        except OSError as error:
            log.error("version may not survive a power loss", model=model, reason=str(error))

    def _enter(self, manifest: Manifest, slot: Callable[[], int | None]) -> Entry | None:
        with self._lock:
            if self._library.admit(manifest):
                number = self._room(manifest, slot)
                try:
                    return self._library.begin(manifest, number)
                except DvlaError:
                    self._pool.discard(number)
                    raise
        self.keep(manifest.model, manifest.version)
        return None

    def _room(self, manifest: Manifest, slot: Callable[[], int | None]) -> int:
        number = slot()
        if number is None:
            self._free(self._library.make_room())
            number = slot()
        if number is None:
            raise Exhausted(
                f"no file is free for version {manifest.version} of {manifest.model}: readers hold them all; "
                "publish a newer version later, or give the weights server a larger budget or more files"
            )
        for entry in [entry for entry in self._library.entries() if entry.slot == number]:
            self._library.drop(entry)  # the retired version whose file this was
        return number

    def _show(self, entry: Entry) -> None:
        self._pool.finish(entry.slot)
        self._free(self._library.seal(entry))

    def _free(self, retired: list[Entry]) -> None:
        for entry in retired:
            if self._pool.release(entry.slot):
                self._library.drop(entry)

    def _restore(self, manifest: Manifest, path: Path) -> None:
        entry = self._enter(manifest, lambda: self._pool.take(manifest.length))
        if entry is None:
            return
        try:
            self._pool[entry.slot].file.start(manifest.length)
            view = self._pool.view(entry.slot)
            safefile.copy_into(path, view)
            verify(manifest, view)
            with self._lock:
                self._show(entry)
            self._durable[manifest.model] = manifest.version
        finally:
            self.abort(entry)
