"""What people do with a weights server: list its versions, look at one, check it, take it out as a file."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from dvla.v1 import weights_pb2

from services.common.bundle import Manifest, Version, WeightTensor
from services.common.bundle_wire import version_from_proto
from services.common.channels import CALL_SECONDS, translated
from services.common.client_fetch import Source, fetch_into, fetch_once
from services.common.errors import ConfigError
from services.common.security import Security
from services.common.sinks import Bytes, TensorSink
from services.weights import safefile


@dataclass(frozen=True)
class Listed:
    """One version on a server."""

    model: str
    version: Version | None
    state: str
    length: int
    age_seconds: float
    readers: tuple[str, ...]


def list_versions(address: str, security: Security | None = None) -> list[Listed]:
    """All versions of all models, newest first; raises Unavailable."""
    source = Source(address, "", security)
    try:
        with translated(f"weights server {address}"):
            reply = source.stub.ListVersions(weights_pb2.ListVersionsRequest(), timeout=CALL_SECONDS)
    finally:
        source.close()
    return [
        Listed(v.model, version_from_proto(v.version), v.state, v.length, v.age_seconds, tuple(v.readers))
        for v in reply.versions
    ]


def read_manifest(address: str, model: str, version: Version | None, security: Security | None = None) -> Manifest:
    """The manifest of a version, by default the newest, without its bytes; raises NotFound."""
    return fetch_into(_Refuse(), address, model, version, security=security)


def verify_version(address: str, model: str, version: Version | None, security: Security | None = None) -> Manifest:
    """Fetch a version and compare all hashes, one tensor in memory at a time; raises InvalidInput if one differs."""
    return fetch_into(_Scratch(), address, model, version, security=security)


def export_version(
    address: str, model: str, version: Version | None, path: Path, security: Security | None = None
) -> Manifest:
    """Write a verified version as a safetensors file, which plain torch can load; raises ConfigError if it exists."""
    if path.exists():
        raise ConfigError(f"{str(path)!r} exists; name another file or remove it")
    manifest, buffer = fetch_once(address, model, version, security=security)
    try:
        safefile.write(path, manifest, buffer)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    return manifest


def describe_list(versions: Iterable[Listed]) -> str:
    """A table in words."""
    lines = [f"{'model':<20} {'version':>10} {'state':<8} {'MB':>10} {'age s':>8}  read or held by"]
    for v in versions:
        readers = ", ".join(v.readers) or "-"
        lines.append(
            f"{v.model:<20} {v.version!s:>10} {v.state:<8} {v.length / 1e6:>10.1f} {v.age_seconds:>8.0f}  {readers}"
        )
    return "\n".join(lines) if len(lines) > 1 else "no versions"


def describe_manifest(manifest: Manifest) -> str:
    """One version in words: what travels with it, and each tensor with its hash."""
    layout = manifest.layout
    lines = [
        f"{manifest.model} {manifest.version}: {len(layout.tensors)} tensors, {manifest.length / 1e6:.1f} MB, "
        f"layout {layout.digest:016x}"
    ]
    lines += [f"  {name}: {_short(text)}" for name, text in sorted(manifest.metadata.items())]
    lines += [f"  {t}  {h:016x}" for t, h in zip(layout.tensors, manifest.hashes, strict=True)]
    lines += [f"  {name!r} is {target!r}" for name, target in sorted(layout.tied.items())]
    return "\n".join(lines)


def parse_version(text: str) -> Version | None:
    """From "epoch-update"; nothing is None, the newest. Raises ConfigError."""
    words = text.split("-")
    if not text:
        return None
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        raise ConfigError(f"version {text!r}; expected epoch-update, such as 1-37, or nothing for the newest")
    return Version(int(words[0]), int(words[1]))


def _short(text: str) -> str:
    try:
        text = json.dumps(json.loads(text))
    except ValueError:
        return f"{text[:200]!r}"
    return text if len(text) <= 200 else f"{text[:200]}..."


class _Refuse(TensorSink):
    """Takes the manifest and wants no bytes."""

    def ready(self, manifest: Manifest) -> bool:
        return False


class _Scratch(TensorSink):
    """Puts every tensor into memory of its own and forgets it."""

    def place(self, tensor: WeightTensor) -> Bytes:
        scratch: npt.NDArray[np.uint8] = np.empty(tensor.length, np.uint8)
        return scratch
