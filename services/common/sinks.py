"""Where a fetched version goes, and the check of every hash on the bytes where they ended up."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from services.common import delta
from services.common.bundle import Buffer, Manifest, Version, WeightTensor, compare, memory, verify
from services.common.errors import DvlaError, InvalidInput
from services.common.parallel import in_parts

Bytes = npt.NDArray[np.uint8]
_PIECE = 512 * 1024  # copied, then hashed while it is still in the cache


class Sink(Protocol):
    """`begin`, then `write` in ascending order, or `copy` once, or `patch` once, then `finish`."""

    def base(self) -> Version | None:
        """The version that a delta could be applied to, if any."""

    def begin(self, manifest: Manifest) -> bool:
        """Get ready for these bytes; False if they are not wanted."""

    def write(self, offset: int, data: Buffer) -> None:
        """Take a frame."""

    def copy(self, source: Bytes) -> None:
        """Take everything from shared memory that is locked for reading."""

    def patch(self, base: Version, data: Buffer) -> None:
        """Take everything by applying a delta to the base. Raises InvalidInput if that fails."""

    def finish(self) -> None:
        """All bytes are there: verify and deliver. Raises InvalidInput if a hash differs."""

    def abort(self) -> None:
        """The transfer failed, or was delivered; give back what `begin` took."""


class TensorSink:
    """Hands over a version tensor by tensor; nothing but these tensors need fit into memory. Subclass it.

    Bytes are copied once, to where `place` says, and are hashed there: what is verified is what was applied.
    From shared memory several threads do that, each with tensors of its own.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self._index = 0
        self._target: Bytes | None = None
        self._hash = xxhash.xxh3_64()

    def ready(self, manifest: Manifest) -> bool:
        """A version begins; False if it is not wanted. May come again for the same version, from its start."""
        return True

    def place(self, tensor: WeightTensor) -> Bytes:
        """A writable uint8 [length] array for this tensor's bytes."""
        raise NotImplementedError

    def placed(self, tensor: WeightTensor, target: Bytes) -> None:
        """The bytes are in their place and verified."""

    def done(self, manifest: Manifest) -> None:
        """The version is complete."""

    def base(self) -> Version | None:
        """None: the tensors are gone, so a delta is of no use."""
        return None

    def begin(self, manifest: Manifest) -> bool:
        """See `ready`."""
        self.manifest, self._index, self._target = manifest, 0, None
        return self.ready(manifest)

    def write(self, offset: int, data: Buffer) -> None:
        """Put a frame into the tensors that it belongs to."""
        manifest, view = self._begun(), memory(data)
        tensors, end = manifest.layout.tensors, offset + len(view)
        while self._index < len(tensors) and tensors[self._index].offset < end:
            tensor = tensors[self._index]
            if self._target is None:
                self._target, self._hash = self.place(tensor), xxhash.xxh3_64()
            start, stop = max(offset, tensor.offset), min(end, tensor.offset + tensor.length)
            if start < stop:
                piece = self._target[start - tensor.offset : stop - tensor.offset]
                piece[:] = np.frombuffer(view[start - offset : stop - offset], np.uint8)
                self._hash.update(piece.data)
            if stop < tensor.offset + tensor.length:
                return
            self._complete(self._index, self._target, self._hash.intdigest())
            self._index, self._target = self._index + 1, None

    def copy(self, source: Bytes) -> None:
        """Take all tensors."""
        tensors = self._begun().layout.tensors

        def take_some(part: range) -> None:
            for number in part:
                self._take(number, tensors[number], source)

        in_parts([tensor.length for tensor in tensors], take_some)
        self._index = len(tensors)

    def patch(self, base: Version, data: Buffer) -> None:
        """Impossible without a base."""
        raise InvalidInput(f"there is nothing to apply a delta to {base} to")

    def finish(self) -> None:
        """Every tensor must have come."""
        manifest = self._begun()
        for tensor in manifest.layout.tensors[self._index :]:
            if tensor.length:
                raise InvalidInput(f"tensor {tensor} of version {manifest.version} did not come")
            self._complete(self._index, self.place(tensor), xxhash.xxh3_64_intdigest(b""))
            self._index += 1
        self.done(manifest)

    def abort(self) -> None:
        """Nothing to give back."""

    def _take(self, number: int, tensor: WeightTensor, source: Bytes) -> None:
        target, hasher = self.place(tensor), xxhash.xxh3_64()
        for start in range(0, tensor.length, _PIECE):
            piece = target[start : start + _PIECE]
            piece[:] = source[tensor.offset + start : tensor.offset + start + len(piece)]
            hasher.update(piece.data)
        self._complete(number, target, hasher.intdigest())

    def _complete(self, number: int, target: Bytes, digest: int) -> None:
        manifest = self._begun()
        tensor = manifest.layout.tensors[number]
        compare(manifest, tensor, digest, manifest.hashes[number])
        self.placed(tensor, target)

    def _begun(self) -> Manifest:
        if self.manifest is None:
            raise DvlaError("bytes came before their manifest")
        return self.manifest


class BufferSink(TensorSink):
    """A flat buffer in memory, reused while the length stays the same. Deltas are applied to it in place."""

    def __init__(self, deliver: Callable[[Manifest, Bytes], None] | None = None) -> None:
        super().__init__()
        self.buffer: Bytes = np.empty(0, np.uint8)
        self._deliver = deliver
        self._whole: Manifest | None = None  # what the buffer holds, if it is intact

    def base(self) -> Version | None:
        """The version in the buffer."""
        return self._whole.version if self._whole else None

    def begin(self, manifest: Manifest) -> bool:
        """Make the buffer fit."""
        if self.buffer.size != manifest.length:
            self._whole, self.buffer = None, np.empty(0, np.uint8)  # never both in memory
            self.buffer = np.zeros(manifest.length, np.uint8)
        return super().begin(manifest)

    def place(self, tensor: WeightTensor) -> Bytes:
        """A part of the buffer, which is another version's no more."""
        self._whole = None
        return self.buffer[tensor.offset : tensor.offset + tensor.length]

    def patch(self, base: Version, data: Buffer) -> None:
        """Apply to the buffer and compare all hashes."""
        manifest, whole = self._begun(), self._whole
        self._whole = None
        if whole is None or whole.version != base or whole.layout.digest != manifest.layout.digest:
            raise InvalidInput(f"the buffer does not hold {base}, to which the delta applies")
        delta.apply(manifest.layout, self.buffer, data)
        verify(manifest, self.buffer)
        self._index = len(manifest.layout.tensors)

    def done(self, manifest: Manifest) -> None:
        """Deliver it."""
        self._whole = manifest
        if self._deliver is not None:
            self._deliver(manifest, self.buffer)
