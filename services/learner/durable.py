"""Folders that are complete or not there: write aside, fsync, rename; a manifest of hashes proves the rest.

A crash at any instant leaves either the whole folder or a leftover that nobody reads. No pointer to a latest one:
the highest complete folder wins.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
import xxhash

from services.common.bundle import Version
from services.common.errors import InvalidInput

log = structlog.get_logger()

MANIFEST = "manifest.json"
_ASIDE = ".aside-"
_PIECE = 4 * 1024 * 1024


def write_folder(root: Path, version: Version, fill: Callable[[Path], None]) -> Path:
    """Make folder "epoch-update" under `root` with what `fill` writes; returns when it is durable.

    A folder of that name is kept as it is: equal versions hold equal state.
    """
    final = root / str(version)
    if final.exists():
        return final
    root.mkdir(parents=True, exist_ok=True)
    aside = root / f"{_ASIDE}{version}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    fill(aside)
    names = sorted(path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file())
    files = {name: _facts(aside / name) for name in names}
    (aside / MANIFEST).write_text(json.dumps({"version": str(version), "files": files}, indent=1) + "\n")
    for path in [*aside.rglob("*"), aside]:
        _sync(path)
    aside.rename(final)
    _sync(root)
    return final


def check_folder(folder: Path) -> None:
    """Compare a folder with its manifest; raises InvalidInput naming the first file that is not as written."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, facts in files.items():
            if _facts(folder / name) != facts:
                raise InvalidInput(f"{str(folder / name)!r} is not as it was written; restore it or delete the folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(f"{str(folder)!r} is not complete ({error}); delete it") from error


def newest_folder(root: Path) -> Path | None:
    """The highest complete folder; damaged ones are named in a warning and passed over."""
    for _, folder in sorted(_folders(root), reverse=True):
        try:
            check_folder(folder)
        except InvalidInput as error:
            log.warning("checkpoint passed over", reason=str(error))
            continue
        return folder
    return None


def prune_folders(root: Path, keep: int) -> None:
    """Delete all but the `keep` highest folders. Renamed first, so that no half of one is ever seen."""
    for _, folder in sorted(_folders(root), reverse=True)[keep:]:
        aside = root / f"{_ASIDE}{folder.name}-{os.getpid()}"
        folder.rename(aside)
        shutil.rmtree(aside)


def sweep_folders(root: Path) -> None:
    """Delete what crashed writers and deleters left. Only the owner of `root` may call it."""
    for leftover in root.glob(f"{_ASIDE}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def parse_version(name: str) -> Version | None:
    """The version that a folder is named after; None for other names."""
    epoch, _, update = name.partition("-")
    return Version(int(epoch), int(update)) if epoch.isdecimal() and update.isdecimal() else None


def _folders(root: Path) -> Iterator[tuple[Version, Path]]:
    for path in root.iterdir() if root.is_dir() else ():
        if path.is_dir() and (version := parse_version(path.name)) is not None:
            yield version, path


def _facts(path: Path) -> dict[str, object]:
    """Size and hash of a file, read in pieces."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    return {"bytes": path.stat().st_size, "xxh3": state.hexdigest()}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
