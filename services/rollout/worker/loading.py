"""Weights on their way into a policy: copied once, to the tensors that inference reads, and hashed there."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.common.bundle import Layout, Manifest, WeightTensor, digest, verify
from services.common.errors import InvalidInput
from services.common.sinks import Bytes, TensorSink
from services.policies.base import Policy
from services.policies.raw import dtype_name

Acquire = Callable[[Manifest], Policy]
"""Gives the policy to load a version into."""
Deliver = Callable[[Manifest, Policy], None]


class PolicySink(TensorSink):
    """Loads versions into whole policies that nobody samples with yet; `deliver` gets each when it is verified.

    A CPU tensor's memory is the target itself; for a GPU the bytes pass through one pinned tensor at a time.
    loading: entered while a policy is half written.
    """

    def __init__(
        self,
        acquire: Acquire,
        deliver: Deliver,
        loading: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        super().__init__()
        self._acquire, self._deliver, self._loading = acquire, deliver, loading
        self._entered = ExitStack()
        self._policy: Policy | None = None
        self._state: dict[str, Tensor] = {}

    def ready(self, manifest: Manifest) -> bool:
        """Take a policy that fits; raises InvalidInput if none does."""
        self._entered.enter_context(self._loading())
        self._policy = self._acquire(manifest)
        self._state = fitting_state(self._policy, manifest)
        return True

    def place(self, tensor: WeightTensor) -> Bytes:
        """The tensor's own memory, if that is reachable from here."""
        target = self._state[tensor.name]
        if target.device.type == "cpu" and target.is_contiguous():
            return raw_bytes(target)
        return torch.empty(tensor.length, dtype=torch.uint8, pin_memory=target.is_cuda).numpy()

    def placed(self, tensor: WeightTensor, target: Bytes) -> None:
        """Bring it to where it belongs, if it is not there yet, and look whether it arrived."""
        own = self._state[tensor.name]
        if own.device.type == "cpu" and own.is_contiguous():
            return
        with torch.no_grad():
            own.copy_(torch.from_numpy(target).view(own.dtype).view(own.shape))
        arrived = raw_bytes(own.detach().contiguous().cpu())
        if digest(arrived) != digest(target):
            raise InvalidInput(f"tensor {tensor} is not what was copied to {own.device}")

    def done(self, manifest: Manifest) -> None:
        """Hand the policy over."""
        if self._policy is not None:
            policy, self._policy = self._policy, None
            copy_ties(self._state, manifest.layout)
            self._deliver(manifest, policy)

    def abort(self) -> None:
        """Let go of the policy; half written, it is loaded as a whole the next time."""
        self._policy, self._state = None, {}
        self._entered.close()


class InPlaceSink(TensorSink):
    """Loads versions into the one policy that samples, for models of which no second one fits.

    Verified where they came from; then, while `pause` holds sampling, copied, verified again where they are, and
    delivered, so that no call takes new weights for the old version. A policy that fails then is damaged: `poison`
    must keep it from being used until a version is loaded into it without failure.
    """

    def __init__(
        self,
        acquire: Acquire,
        deliver: Deliver,
        pause: Callable[[], AbstractContextManager[object]] = nullcontext,
        poison: Callable[[str], None] = lambda reason: None,
    ) -> None:
        super().__init__()
        self._acquire, self._deliver, self._pause, self._poison = acquire, deliver, pause, poison
        self._buffer: Bytes = np.empty(0, np.uint8)

    def ready(self, manifest: Manifest) -> bool:
        """Always; frames are collected beside the policy."""
        return True

    def place(self, tensor: WeightTensor) -> Bytes:
        """A part of a buffer, made when frames come; not needed where memory is shared."""
        manifest = self._begun()
        if self._buffer.size != manifest.length:
            self._buffer = np.zeros(manifest.length, np.uint8)
        return self._buffer[tensor.offset : tensor.offset + tensor.length]

    def copy(self, source: Bytes) -> None:
        """Straight from shared memory."""
        manifest = self._begun()
        verify(manifest, source)
        self._load(manifest, source)
        self._index = len(manifest.layout.tensors)

    def finish(self) -> None:
        """From the buffer, if the version came in frames."""
        manifest = self._begun()
        if self._loaded != manifest:
            super().finish()
            self._load(manifest, self._buffer)

    def begin(self, manifest: Manifest) -> bool:
        """Forget what was loaded before."""
        self._loaded: Manifest | None = None
        return super().begin(manifest)

    def _load(self, manifest: Manifest, source: Bytes) -> None:
        policy = self._acquire(manifest)
        state = fitting_state(policy, manifest)
        with self._pause(), torch.no_grad():
            for tensor in manifest.layout.tensors:
                own = state[tensor.name]
                raw = source[tensor.offset : tensor.offset + tensor.length]
                if own.device.type == "cpu" and own.is_contiguous():
                    raw_bytes(own)[:] = raw
                else:
                    own.copy_(torch.from_numpy(raw.copy()).view(own.dtype).view(own.shape))
            copy_ties(state, manifest.layout)
            for tensor, expected in zip(manifest.layout.tensors, manifest.hashes, strict=True):
                if digest(raw_bytes(state[tensor.name].detach().contiguous().cpu())) != expected:
                    self._poison(f"tensor {tensor} of version {manifest.version} is damaged")
                    raise InvalidInput(f"tensor {tensor} of version {manifest.version} was damaged while it was loaded")
            self._deliver(manifest, policy)
        self._loaded = manifest


def fitting_state(policy: Policy, manifest: Manifest) -> dict[str, Tensor]:
    """The policy's own tensors by name; raises InvalidInput unless the version has exactly these."""
    own = policy.trainable_state()
    layout = manifest.layout
    names = {tensor.name for tensor in layout.tensors} | layout.tied.keys()
    missing, extra = sorted(own.keys() - names), sorted(names - own.keys())
    if missing or extra:
        raise InvalidInput(f"weights do not fit {policy.spec.family}: missing {missing[:3]}, unexpected {extra[:3]}")
    for tensor in layout.tensors:
        target = own[tensor.name]
        if (dtype_name(target.dtype), tuple(target.shape)) != (tensor.dtype, tensor.shape):
            raise InvalidInput(
                f"weights do not fit {policy.spec.family}: {tensor}, expected {target.dtype}{tuple(target.shape)}"
            )
    return own


@torch.no_grad()
def copy_ties(state: Mapping[str, Tensor], layout: Layout) -> None:
    """Tied tensors travel once; a policy that keeps them apart gets each of them."""
    for name, target in layout.tied.items():
        if state[name].data_ptr() != state[target].data_ptr():
            state[name].copy_(state[target])


def described(manifest: Manifest) -> dict[str, Any]:
    """The policy's configuration, which travels with its weights; raises InvalidInput."""
    try:
        words = json.loads(manifest.metadata["policy"])
    except (KeyError, ValueError) as error:
        raise InvalidInput(f"version {manifest.version} does not say which policy it belongs to") from error
    if not isinstance(words, dict):
        raise InvalidInput(f"version {manifest.version} describes its policy as {type(words).__name__}")
    return words


def raw_bytes(tensor: Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor as uint8 [bytes], shared."""
    flat: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat
