"""Where a publisher prepares versions: flat files in shared memory that the weights server takes over by name.

The server and its readers lock such a file while they need it; the publisher fills it again when nobody does. A
version is thus written once, by its owner, and never copied on its way. Without shared memory: plain buffers.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from services.common.errors import Exhausted
from services.common.flatfile import FlatFile

PREFIX = "publish"
log = structlog.get_logger()


class Stage:
    """Room for one version: `buffer` is uint8 [length], writable until the version is published."""

    def __init__(self, file: FlatFile | None, length: int) -> None:
        self.file = file
        self.buffer: npt.NDArray[np.uint8] = file.view if file else np.zeros(length, np.uint8)
        self.generation = 0
        self.taken = True

    def give_back(self) -> None:
        """It will not be published after all: it may be taken again."""
        self.taken = False

    def seal(self) -> None:
        """The bytes are complete: readers may lock the file from now on."""
        if self.file is not None and not self.generation:
            self.generation = self.file.finish(len(self.buffer))
            self.file.unlock()


class Stages:
    """At most so many stages, used again and again. One thread takes them; any may give them back."""

    def __init__(self, folder: Path | None, most: int) -> None:
        self._folder, self._most = folder, most
        self._stages: list[Stage] = []

    def take(self, length: int, keep: Sequence[Stage] = ()) -> Stage | None:
        """A stage that nobody uses, its old content void; None if all are in use. Those of `keep` are left alone."""
        for stage in self._stages:
            if stage in keep or stage.taken or not (stage.file is None or stage.file.try_lock_exclusive()):
                continue
            self._stages.remove(stage)
            return self._add(stage.file, length, stage)
        if len(self._stages) >= self._most:
            return None
        return self._add(self._create(), length, None)

    def close(self) -> None:
        """Delete the files that nobody reads; the others are left to whoever does."""
        for stage in self._stages:
            if stage.file is None:
                continue
            if stage.taken or stage.file.try_lock_exclusive():
                stage.file.remove()
            else:
                stage.file.close()
        self._stages.clear()

    def _add(self, file: FlatFile | None, length: int, old: Stage | None) -> Stage:
        if file is not None:
            try:
                file.start(length)
            except Exhausted as error:
                log.warning("no shared memory, weights travel by grpc", reason=str(error))
                file.remove()
                file, old, self._folder = None, None, None
        if old is not None and len(old.buffer) == length:
            stage = old
            stage.generation, stage.taken = 0, True
        else:
            stage = Stage(file, length)
        self._stages.append(stage)
        return stage

    def _create(self) -> FlatFile | None:
        if self._folder is None:
            return None
        try:
            return FlatFile.create(self._folder, PREFIX)
        except OSError as error:
            log.warning("no shared memory, weights travel by grpc", reason=str(error))
            self._folder = None
            return None
