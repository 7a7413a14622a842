"""Versions as safetensors files: any tool that knows the format can read them, and we check every byte.

Written by streaming, so a version is never in memory twice. What the format does not know (version, hashes,
order, tied names, metadata) lies as JSON under the key "dvla" of its free-text metadata.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from services.common.bundle import PIECE, Buffer, Layout, Manifest, Version, check, memory, plan
from services.common.errors import InvalidInput

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""torch dtype name -> safetensors dtype name."""
_MAX_HEADER = 100_000_000  # the format's own limit
_LENGTH = struct.Struct("<Q")


def write(path: Path, manifest: Manifest, buffer: Buffer) -> None:
    """Write a new file; the kernel brings it to the disk in its own time."""
    flat = memory(buffer)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:
        header = _header(manifest)
        out.write(_LENGTH.pack(len(header)) + header)
        for tensor in manifest.layout.tensors:
            for start in range(tensor.offset, tensor.offset + tensor.length, PIECE):
                out.write(flat[start : min(start + PIECE, tensor.offset + tensor.length)])


def read_manifest(path: Path) -> Manifest:
    """The checked manifest of a file; raises InvalidInput if it is damaged or not one of ours."""
    with path.open("rb") as file:
        return _manifest(path, file)[0]


def copy_into(path: Path, target: npt.NDArray[np.uint8]) -> None:
    """Put the tensors at their places of a flat array. Hashes are not compared here."""
    with path.open("rb") as file:
        manifest, position = _manifest(path, file)
        for tensor in manifest.layout.tensors:
            file.seek(position)
            position += tensor.length
            for start in range(0, tensor.length, PIECE):
                place = target[tensor.offset + start : tensor.offset + min(start + PIECE, tensor.length)]
                if file.readinto(memory(place)) != len(place):
                    raise InvalidInput(f"{str(path)!r} ends within tensor {tensor}")


def _header(manifest: Manifest) -> bytes:
    facts = {
        "model": manifest.model,
        "epoch": manifest.version.epoch,
        "update": manifest.version.update,
        "tensors": [[t.name, t.dtype, t.shape] for t in manifest.layout.tensors],
        "hashes": manifest.hashes,
        "tied": dict(manifest.layout.tied),
        "metadata": dict(manifest.metadata),
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "dvla": json.dumps(facts)}}
    position = 0
    for t in manifest.layout.tensors:
        offsets = [position, position + t.length]
        header[t.name] = {"dtype": NAMES[t.dtype], "shape": t.shape, "data_offsets": offsets}
        position += t.length
    raw = json.dumps(header).encode()
    return raw + b" " * (-len(raw) % 8)


def _manifest(path: Path, file: BinaryIO) -> tuple[Manifest, int]:
    """The manifest, and where the first tensor begins in the file."""
    try:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > _MAX_HEADER:
            raise InvalidInput(f"{str(path)!r} announces a header of {length} bytes")
        facts = json.loads(json.loads(file.read(length))["__metadata__"]["dvla"])
        specs = [(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in facts["tensors"]]
        layout: Layout = plan(specs, {str(k): str(v) for k, v in facts["tied"].items()})
        manifest = Manifest(
            model=str(facts["model"]),
            version=Version(int(facts["epoch"]), int(facts["update"])),
            layout=layout,
            hashes=tuple(map(int, facts["hashes"])),
            metadata={str(k): str(v) for k, v in facts["metadata"].items()},
        )
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{str(path)!r} is damaged or not written by this program: {error!r}") from error
    check(manifest)
    return manifest, _LENGTH.size + length
