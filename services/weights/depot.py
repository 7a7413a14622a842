"""Versions with their bytes: the library's rules, the files and the archive put together. Thread-safe.

draft = depot.begin(manifest)       None if it is here already
draft.write(offset, data) ...       frames in any order, or draft.copy(file)
draft.seal()                        verified, durable, then readable; else draft.abort()

with depot.open(model) as reading:  the newest; its file cannot be rewritten inside the block
    reading.file.read(offset, length)
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from services.common.bundle import PIECE, Buffer, Manifest, Version, verify
from services.common.errors import DvlaError, Exhausted, InvalidInput, NotFound
from services.common.flatfile import FlatFile
from services.weights import safefile
from services.weights.coverage import Coverage
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


class Reading:
    """A sealed version under a shared lock. Use it in a `with`."""

    def __init__(self, manifest: Manifest, file: FlatFile, generation: int, done: Callable[[], None]) -> None:
        self.manifest = manifest
        self.file = file
        self.generation = generation
        self._done = done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self._done()


class Draft:
    """A version that is being written. One thread at a time. End it by `seal` or `abort`; `abort` may follow."""

    def __init__(self, depot: "Depot", entry: Entry, file: FlatFile) -> None:
        self._depot, self._entry, self._file = depot, entry, file
        self._coverage = Coverage(entry.manifest.length)
        self._busy = threading.Lock()  # an abort waits for a copy or a seal that runs in another thread

    @property
    def manifest(self) -> Manifest:
        """What is being written."""
        return self._entry.manifest

    def write(self, offset: int, data: Buffer) -> None:
        """Put bytes in place; raises InvalidInput if they do not belong there or came before."""
        self._coverage.add(offset, len(data))
        self._file.write(offset, data)

    def copy(self, source: FlatFile) -> None:
        """Take all bytes from another flat file."""
        with self._busy:
            for offset in range(0, self.manifest.length, PIECE):
                length = min(PIECE, self.manifest.length - offset)
                self.write(offset, source.read(offset, length))

    def seal(self) -> Version:
        """Verify all hashes, make the version durable, then make it readable, the newest.

        Raises InvalidInput naming a tensor that is missing or damaged, and Superseded if a newer version or a
        newer epoch came first. The version that was current stays current then.
        """
        gap = self._coverage.gap()
        if gap:
            inside = next((t for t in self.manifest.layout.tensors if t.offset + t.length > gap[0]), "padding")
            raise InvalidInput(f"bytes {gap[0]} to {gap[1]} were not sent (tensor {inside})")
        with self._busy:
            verify(self.manifest, self._file.read)
            return self._depot._seal(self._entry, self._file.read)

    def abort(self) -> None:
        """Throw it away if it is not sealed; safe to call at any time, from any thread."""
        with self._busy:
            self._depot._abort(self._entry)


class Depot:
    """All versions of one weights process."""

    def __init__(self, keep: int, pool: FilePool, archive: Archive | None = None) -> None:
        self._library = Library(keep, time.monotonic)
        self._pool, self._archive = pool, archive
        self._lock = threading.RLock()  # library and pool
        self._sealing = threading.Lock()  # one seal or fence at a time; held while the disk is written
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
                    self._restore(manifest, partial(safefile.copy_into, path))
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
        """Start a version; None if it is the newest sealed one already.

        Raises Superseded if its epoch or version is too old, Exhausted if readers hold all files.
        """
        with self._lock:
            if not self._library.admit(manifest):
                return None
            number = self._slot(manifest)
            try:
                entry = self._library.begin(manifest, number)
            except DvlaError:
                self._pool.discard(number)
                raise
            file = self._pool[number].file
        try:
            file.start(manifest.length)  # takes seconds for gigabytes, so readers must not wait for it
        except DvlaError:
            with self._lock:
                self._library.drop(entry)
                self._pool.discard(number)
            raise
        return Draft(self, entry, file)

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
        return Reading(entry.manifest, file, slot.generation, lambda: entry.readers.remove(reader))

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
            return list(self._pool.blocked(seconds))

    def reserved(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return self._pool.reserved()

    def close(self) -> None:
        """Remove all files and give the archive's folder back."""
        with self._sealing, self._lock:
            self._pool.close()
            if self._archive:
                self._archive.close()

    def _slot(self, manifest: Manifest) -> int:
        number = self._pool.take(manifest.length)
        if number is None:
            self._free(self._library.make_room())
            number = self._pool.take(manifest.length)
        if number is None:
            raise Exhausted(
                f"no file is free for version {manifest.version} of {manifest.model}: readers hold them all; "
                "publish a newer version later, or give the weights server a larger budget or more files"
            )
        for entry in [entry for entry in self._library.entries() if entry.slot == number]:
            self._library.drop(entry)  # the retired version whose file this was
        return number

    def _seal(self, entry: Entry, read: Callable[[int, int], bytes]) -> Version:
        manifest = entry.manifest
        with self._sealing:
            with self._lock:
                if entry.state != "writing":
                    raise ValueError(f"version {entry.version} has been aborted or sealed before")
                repeated = not self._library.admit(manifest)
            if repeated:  # another try of the same publish was faster
                return manifest.version
            if self._archive:
                self._archive.save(manifest, read)
            self._show(entry)
        for listener in self._listeners:
            listener(manifest.model)
        return manifest.version

    def _show(self, entry: Entry) -> None:
        with self._lock:
            self._pool.finish(entry.slot)
            self._free(self._library.seal(entry))

    def _abort(self, entry: Entry) -> None:
        with self._lock:
            if entry.state == "writing":
                entry.state = "retired"
                self._library.drop(entry)
                self._pool.release(entry.slot)

    def _free(self, retired: list[Entry]) -> None:
        for entry in retired:
            self._pool.release(entry.slot)

    def _restore(self, manifest: Manifest, fill: Callable[[FlatFile], None]) -> None:
        draft = self.begin(manifest)
        if draft is None:
            raise NotFound(f"version {manifest.version} of {manifest.model} is restored already")
        try:
            fill(draft._file)
            verify(manifest, draft._file.read)
            self._show(draft._entry)
        finally:
            draft.abort()
