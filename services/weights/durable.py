"""The newest versions and the fences on disk, so that they are back after a restart.

    <folder>/.lock                             held by the one server that uses the folder
    <folder>/<model>/fence                     the fenced epoch
    <folder>/<model>/<epoch>-<update>.safetensors

Everything is written under a temporary name, then renamed. A version then survives the death of any process at once,
and a power loss as soon as `sync` has brought it to the disk, which nobody waits for: a slow disk must not hold up
training. A file that a power loss tore is known by its hashes, set aside, and the synced one before it is used.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from services.common.bundle import Buffer, Manifest
from services.common.errors import ConfigError, Exhausted, InvalidInput
from services.weights import safefile

KEEP = 2
"""Versions of a model on disk: a second one, should the newest turn out damaged."""
_SUFFIX = ".safetensors"
_TEMPORARY = ".partial"
log = structlog.get_logger()


class Archive:
    """One folder, owned by this process until `close`. One thread saves versions; another may save fences."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(f"folder {str(folder)!r} is used by another weights server; name another") from error
        except OSError as error:
            raise ConfigError(f"folder {str(folder)!r} cannot be used: {error.strerror}; name another") from error
        self._folder = folder
        for partial in folder.glob(f"*/*{_TEMPORARY}"):
            partial.unlink()

    def save(self, manifest: Manifest, buffer: Buffer) -> None:
        """Store a version; raises Exhausted if the disk refuses it. Call `sync` afterwards, in another thread."""
        path = self._folder / manifest.model / f"{manifest.version}{_SUFFIX}"
        partial = path.with_suffix(_TEMPORARY)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            partial.unlink(missing_ok=True)
            safefile.write(partial, manifest, buffer)
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):  # the room it takes is wanted back, but the error that counts is the first
                partial.unlink(missing_ok=True)
            raise Exhausted(
                f"version {manifest.version} of {manifest.model} cannot be written to {str(self._folder)!r}: "
                f"{error.strerror}; make room there"
            ) from error

    def sync(self, model: str) -> None:
        """Bring a model's newest version to the disk, then remove older ones. Takes as long as the disk takes."""
        newest, *older = self._versions(model)
        for path in (newest, newest.parent):
            _sync(path)
        for old in older[KEEP - 1 :]:
            old.unlink()

    def save_fence(self, model: str, epoch: int) -> None:
        """Make a fence durable; raises Exhausted if the disk refuses it."""
        path = self._folder / model / "fence"
        partial = path.with_suffix(_TEMPORARY)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with partial.open("w") as out:
                out.write(str(epoch))
            _sync(partial)
            os.replace(partial, path)
            _sync(path.parent)
        except OSError as error:
            raise Exhausted(f"fence {epoch} of {model} cannot be written: {error.strerror}") from error

    def fences(self) -> dict[str, int]:
        """Model -> fenced epoch."""
        out = {}
        for path in sorted(self._folder.glob("*/fence")):
            text = path.read_text().strip()
            if not text.isdecimal():
                raise ConfigError(f"{str(path)!r} holds {text!r}, not an epoch; restore or remove it")
            out[path.parent.name] = int(text)
        return out

    def stored(self, model: str) -> Iterator[tuple[Manifest, Path]]:
        """The versions of a model, newest first; damaged ones are set aside and logged."""
        for path in self._versions(model):
            try:
                yield safefile.read_manifest(path), path
            except InvalidInput as error:
                self.set_aside(path, error)

    def models(self) -> list[str]:
        """Names of the models that have a folder."""
        return sorted(path.name for path in self._folder.iterdir() if path.is_dir())

    def set_aside(self, path: Path, error: Exception) -> None:
        """Rename a damaged file, so that it is never read again but can be looked at."""
        log.error("a stored version is damaged and set aside", path=str(path), error=str(error))
        path.rename(path.with_suffix(".damaged"))

    def close(self) -> None:
        """Give the folder back."""
        os.close(self._lock)

    def _versions(self, model: str) -> list[Path]:
        paths = [path for path in (self._folder / model).glob(f"*{_SUFFIX}") if _key(path)]
        return sorted(paths, key=_key, reverse=True)


def _key(path: Path) -> tuple[int, ...]:
    """(epoch, update) of a file name; empty if it is none of ours."""
    words = path.name.removesuffix(_SUFFIX).split("-")
    return tuple(map(int, words)) if len(words) == 2 and all(word.isdecimal() for word in words) else ()


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
