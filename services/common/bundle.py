"""A named set of weight tensors as one flat run of bytes: layout, packing, hashes and checks.

    layout = plan([("w", "bfloat16", (4, 3)), ...])      once per model
    pack(layout, arrays, buffer)                         or write through views(layout, buffer)
    manifest = seal(layout, "policy", Version(1, 0), buffer)
    verify(manifest, buffer); views(manifest.layout, buffer)

dtypes have torch names; numpy lacks some (bfloat16, float8), which appear as unsigned integers of the same
width. Tied tensors lie in the buffer once and are known by all their names. No torch, no protobuf, no I/O.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
import xxhash

from services.common.errors import InvalidInput
from services.common.parallel import in_parts
from services.common.spec import Array

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

ALIGNMENT = 256
PIECE = 4 * 1024 * 1024  # bytes moved at once between memory and a disk
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 16
MAX_BYTES = 2**46
DTYPES: dict[str, str] = {
    "bool": "bool",
    "uint8": "uint8",
    "int8": "int8",
    "uint16": "uint16",
    "int16": "int16",
    "uint32": "uint32",
    "int32": "int32",
    "uint64": "uint64",
    "int64": "int64",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
}
"""torch dtype name -> numpy dtype of its raw bytes."""


@dataclass(frozen=True, order=True)
class Version:
    """A version of the weights, ordered by (epoch, update). Printed as "epoch-update"."""

    epoch: int
    update: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.update}"


@dataclass(frozen=True)
class WeightTensor:
    """One tensor in the buffer: state_dict name, torch dtype name, shape, first byte, length in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies. Equal digests mean that buffers can be copied flat.

    tied: further names of tensors that are stored once, as (name -> name of the stored tensor).
    """

    tensors: tuple[WeightTensor, ...]
    length: int
    tied: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> int:
        """xxh3-64 over names, dtypes, shapes and offsets."""
        facts = [[[t.name, t.dtype, t.shape, t.offset] for t in self.tensors], sorted(self.tied.items())]
        return xxhash.xxh3_64_intdigest(json.dumps(facts).encode())


@dataclass(frozen=True)
class Manifest:
    """Describes one version completely. hashes: xxh3-64 per tensor, in layout order.

    metadata: whatever else changes the policy's output ("policy": its configuration as JSON, ...).
    """

    model: str
    version: Version
    layout: Layout
    hashes: tuple[int, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Length of the buffer in bytes."""
        return self.layout.length


def plan(specs: Iterable[tuple[str, str, tuple[int, ...]]], tied: Mapping[str, str] | None = None) -> Layout:
    """Lay out (name, torch dtype, shape) one after another, each 256-byte aligned.

    Raises InvalidInput on a name given twice, an unknown dtype, a bad shape, or a tied name without its tensor.
    """
    tensors: list[WeightTensor] = []
    offset = 0
    for name, dtype, shape in specs:
        length = _size(name, dtype, shape)
        tensors.append(WeightTensor(name, dtype, tuple(shape), offset, length))
        offset = _aligned(offset + length)
    layout = Layout(tuple(tensors), offset, dict(tied or {}))
    _check_names(layout)
    return layout


def describe(arrays: Mapping[str, Array], dtypes: Mapping[str, str] | None = None) -> Layout:
    """The layout of these arrays; arrays that share all their memory are tied to the first of them.

    dtypes: torch names where the numpy dtype does not say it, such as {"w": "bfloat16"} for a uint16 array.
    """
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    specs = []
    for name, array in arrays.items():
        dtype = (dtypes or {}).get(name, array.dtype.name)
        memory = (array.__array_interface__["data"][0], array.shape, array.strides, dtype)
        if array.nbytes and memory in first:
            tied[name] = first[memory]
            continue
        first[memory] = name
        specs.append((name, dtype, array.shape))
    return plan(specs, tied)


def check(manifest: Manifest) -> None:
    """Check a manifest from outside: every name, dtype, shape, offset and length; raises InvalidInput.

    Only the canonical layout, the one that `plan` makes, is accepted: no overlaps, no gaps, no surprises.
    """
    layout = manifest.layout
    if len(layout.tensors) > MAX_TENSORS:
        raise InvalidInput(f"manifest has {len(layout.tensors)} tensors; expected at most {MAX_TENSORS}")
    expected = plan([(t.name, t.dtype, t.shape) for t in layout.tensors], layout.tied)
    for tensor, right in zip(layout.tensors, expected.tensors, strict=True):
        if (tensor.offset, tensor.length) != (right.offset, right.length):
            raise InvalidInput(
                f"tensor {tensor} lies at {tensor.offset}, {tensor.length} bytes; "
                f"expected {right.offset}, {right.length} bytes"
            )
    if layout.length != expected.length:
        raise InvalidInput(f"manifest has length {layout.length}; its tensors need {expected.length}")
    if len(manifest.hashes) != len(layout.tensors):
        raise InvalidInput(f"manifest has {len(manifest.hashes)} hashes for {len(layout.tensors)} tensors")


def views(layout: Layout, buffer: Buffer, writable: bool = False) -> dict[str, Array]:
    """Views of all tensors, tied names included, without a copy. Read-only unless asked otherwise."""
    flat = as_bytes(buffer, layout.length)
    out: dict[str, Array] = {}
    for tensor in layout.tensors:
        raw = flat[tensor.offset : tensor.offset + tensor.length]
        view = raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
        view.flags.writeable = writable
        out[tensor.name] = view
    return out | {name: out[target] for name, target in layout.tied.items()}


def pack(layout: Layout, arrays: Mapping[str, Array], buffer: Buffer) -> None:
    """Copy arrays into a writable buffer; padding becomes zero. Raises InvalidInput naming what does not fit."""
    names = {t.name for t in layout.tensors}
    missing, extra = sorted(names - arrays.keys()), sorted(arrays.keys() - names - layout.tied.keys())
    if missing or extra:
        raise InvalidInput(f"tensors do not fit the layout: missing {missing[:3]}, unexpected {extra[:3]}")
    flat = as_bytes(buffer, layout.length)
    places = views(layout, flat, writable=True)
    for tensor in layout.tensors:
        source, place = arrays[tensor.name], places[tensor.name]
        if source.shape != place.shape or source.dtype != place.dtype:
            raise InvalidInput(f"tensor {tensor} is given as {source.dtype}{list(source.shape)}")
        np.copyto(place, source)
        end = tensor.offset + tensor.length
        flat[end : _aligned(end)] = 0


def seal(
    layout: Layout, model: str, version: Version, buffer: Buffer, metadata: Mapping[str, str] | None = None
) -> Manifest:
    """The manifest of a packed buffer: computes all hashes."""
    flat = as_bytes(buffer, layout.length)
    return Manifest(model, version, layout, hashes(layout, flat), dict(metadata or {}))


def bundle(
    model: str,
    version: Version,
    arrays: Mapping[str, Array],
    dtypes: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Manifest, npt.NDArray[np.uint8]]:
    """Describe, pack into a new buffer and seal."""
    layout = describe(arrays, dtypes)
    buffer = np.empty(layout.length, np.uint8)
    pack(layout, arrays, buffer)
    return seal(layout, model, version, buffer, metadata), buffer


def verify(manifest: Manifest, buffer: Buffer) -> None:
    """Compare every hash; raises InvalidInput naming the first tensor whose bytes differ."""
    found = hashes(manifest.layout, as_bytes(buffer, manifest.length))
    for tensor, actual, expected in zip(manifest.layout.tensors, found, manifest.hashes, strict=True):
        compare(manifest, tensor, actual, expected)


def hashes(layout: Layout, flat: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    """xxh3-64 of every tensor in a flat array, by several threads."""
    out = [0] * len(layout.tensors)

    def hash_some(part: range) -> None:
        for number in part:
            tensor = layout.tensors[number]
            out[number] = xxhash.xxh3_64_intdigest(flat[tensor.offset : tensor.offset + tensor.length].data)

    in_parts([tensor.length for tensor in layout.tensors], hash_some)
    return tuple(out)


def verify_arrays(manifest: Manifest, arrays: Mapping[str, Array]) -> None:
    """Compare what was applied with the manifest; raises InvalidInput naming a tensor that differs.

    arrays: C-contiguous raw arrays by name, taken from the model after loading. Tied names are not needed.
    """
    for tensor, expected in zip(manifest.layout.tensors, manifest.hashes, strict=True):
        if tensor.name not in arrays:
            raise InvalidInput(f"tensor {tensor} of version {manifest.version} was not applied")
        compare(manifest, tensor, digest(arrays[tensor.name]), expected)


def digest(array: Array) -> int:
    """xxh3-64 of an array's bytes in C order."""
    return xxhash.xxh3_64_intdigest(memory(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


def as_bytes(buffer: Buffer, length: int) -> npt.NDArray[np.uint8]:
    """The first `length` bytes of a buffer as a flat array; raises InvalidInput if it is shorter."""
    flat = np.frombuffer(buffer, np.uint8) if len(buffer) else np.empty(0, np.uint8)
    if flat.size < length:
        raise InvalidInput(f"buffer has {flat.size} bytes; expected at least {length}")
    return flat[:length]


def memory(buffer: Buffer) -> memoryview:
    """A flat view of any buffer, for functions that know the buffer protocol but not numpy."""
    return as_bytes(buffer, len(buffer)).data


def compare(manifest: Manifest, tensor: WeightTensor, actual: int, expected: int) -> None:
    """Raises InvalidInput naming the tensor if its hash is not the expected one."""
    if actual != expected:
        raise InvalidInput(
            f"tensor {tensor} of {manifest.model} {manifest.version} has hash {actual:016x}; "
            f"the manifest says {expected:016x}"
        )


def _size(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPES:
        raise InvalidInput(f"tensor {name!r} has dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMENSIONS or any(side < 0 for side in shape):
        raise InvalidInput(
            f"tensor {name!r} has shape {list(shape)}; expected at most {MAX_DIMENSIONS} sides, none below 0"
        )
    itemsize = np.dtype(DTYPES[dtype]).itemsize
    # numpy computes strides from the sides other than 0, so these must not overflow even in an empty tensor.
    if prod(side for side in shape if side) * itemsize > MAX_BYTES:
        raise InvalidInput(f"tensor {name!r} has shape {list(shape)}; expected at most {MAX_BYTES} bytes")
    return prod(shape) * itemsize


def _check_names(layout: Layout) -> None:
    known: set[str] = set()
    for tensor in layout.tensors:
        if tensor.name in known:
            raise InvalidInput(f"tensor {tensor.name!r} is listed twice")
        known.add(tensor.name)
    for name, target in layout.tied.items():
        if target not in known or name in known:
            raise InvalidInput(f"tensor {name!r} is tied to {target!r}; expected a new name and a listed tensor")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
