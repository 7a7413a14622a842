"""One version on its way in, and one that is being read."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from services.common import delta
from services.common.bundle import Buffer, Manifest, Version, memory, verify
from services.common.errors import InvalidInput, Unsupported
from services.common.flatfile import FlatFile
from services.common.parallel import in_parts
from services.weights.coverage import Coverage
from services.weights.library import Entry

if TYPE_CHECKING:
    from services.weights.depot import Depot

_COPY_BYTES = 8 * 1024 * 1024


class Reading:
    """A sealed version under a shared lock: `view` is uint8 [length], read-only. Use it in a `with`."""

    def __init__(
        self, entry: Entry, file: FlatFile, generation: int, view: npt.NDArray[np.uint8], done: Callable[[], None]
    ) -> None:
        self.manifest = entry.manifest
        self.file = file
        self.generation = generation
        self.view = view
        self._done = done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
        self._done()


class Draft:
    """A version that is being written. One thread at a time. End it by `seal` or `abort`; `abort` may follow.

    whole: its bytes are there already, in an adopted file.
    """

    def __init__(self, depot: "Depot", entry: Entry, view: npt.NDArray[np.uint8], whole: bool) -> None:
        self._depot, self._entry, self._view = depot, entry, view
        self._coverage = Coverage(entry.manifest.length)
        self._whole = whole
        self._verified = False
        self._delta: tuple[Version, bytes] | None = None
        self._busy = threading.Lock()  # an abort waits for a copy or a seal that runs in another thread

    @property
    def manifest(self) -> Manifest:
        """What is being written."""
        return self._entry.manifest

    def write(self, offset: int, data: Buffer) -> None:
        """Put bytes in place; raises InvalidInput if they do not belong there or came before."""
        self._coverage.add(offset, len(data))
        self._view[offset : offset + len(data)] = np.frombuffer(memory(data), np.uint8)

    def copy(self, source: npt.NDArray[np.uint8]) -> None:
        """Take all bytes from a flat array."""
        with self._busy:
            self._copy(source)
            self._whole = True

    def apply(self, base: Version, data: Buffer) -> None:
        """Take the bytes of the base, which must be the newest sealed version, and bring them up to date by a delta.

        Raises Unsupported if that base is not here, and InvalidInput if the delta is damaged.
        """
        with self._busy, self._depot.base(self.manifest, base) as reading:
            if reading.manifest.layout.digest != self.manifest.layout.digest:
                raise Unsupported(f"version {base} has another layout than {self.manifest.version}; send it whole")
            self._copy(reading.view)
            delta.apply(self.manifest.layout, self._view, data)
            self._whole = True
            self._delta = base, bytes(data)

    def check(self) -> None:
        """Compare all hashes now; raises InvalidInput. `seal` need not do it again then."""
        with self._busy:
            self._verify()

    def seal(self) -> Version:
        """Verify all hashes, then make the version readable, the newest; returns when it is stored, too.

        Raises InvalidInput naming a tensor that is missing or damaged, and Superseded if a newer version or a
        newer epoch came first: the version that was current stays current then. Raises Exhausted if the disk
        refuses it: it is readable then, but would not survive a restart.
        """
        gap = None if self._whole else self._coverage.gap()
        if gap:
            inside = next((t for t in self.manifest.layout.tensors if t.offset + t.length > gap[0]), "padding")
            raise InvalidInput(f"bytes {gap[0]} to {gap[1]} were not sent (tensor {inside})")
        with self._busy:
            self._verify()
            if self._delta:
                self._depot.deltas.put(self.manifest, *self._delta)
            return self._depot.seal(self._entry)

    def abort(self) -> None:
        """Throw it away if it is not sealed; safe to call at any time, from any thread."""
        with self._busy:
            self._depot.abort(self._entry)

    def _verify(self) -> None:
        if not self._verified:
            verify(self.manifest, self._view)
            self._verified = True

    def _copy(self, source: npt.NDArray[np.uint8]) -> None:
        starts = range(0, self.manifest.length, _COPY_BYTES)

        def copy_some(part: range) -> None:
            for number in part:
                piece = slice(starts[number], starts[number] + _COPY_BYTES)
                self._view[piece] = source[piece]

        in_parts([_COPY_BYTES] * len(starts), copy_some)
