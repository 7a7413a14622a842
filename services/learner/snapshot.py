"""The one pause that publishing costs training: a flat copy of the trainable state into a staging buffer.

The policy's tensors are laid side by side beforehand (`gather_home`), because one long copy is half as long as many
short ones. On a CPU it goes straight to where the weights server will read it. On a GPU it stays on the device;
`Staging.settle` brings it to pinned memory on a side stream, in lane 4. Sharded parameters are gathered one by one.
"""

import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import structlog
import torch
from torch import Tensor

from services.common import bundle
from services.common.bundle import Buffer, Layout
from services.common.staging import Stage
from services.policies.base import Policy
from services.policies.raw import dtype_name

log = structlog.get_logger()


class Staging:
    """A snapshot of one version in an attached stage, with a view per tensor. Used again for version after version."""

    def __init__(self, layout: Layout, device: torch.device, stage: Stage, home: Tensor | None = None) -> None:
        self._layout, self._home = layout, home
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._flat = torch.zeros(layout.length, dtype=torch.uint8, device=device) if self._stream else None
        self._known: weakref.WeakKeyDictionary[Stage, dict[str, Tensor]] = weakref.WeakKeyDictionary()
        self.attach(stage)

    def attach(self, stage: Stage) -> None:
        """Use this stage from now on; the one before belongs to its readers."""
        self.stage = stage
        if stage not in self._known:
            self._known[stage] = self._views(torch.from_numpy(stage.buffer) if self._flat is None else self._flat)
            if self._stream is not None:
                _pin(stage)
        self._targets = self._known[stage]

    @torch.no_grad()
    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Copy the state. On a GPU the copy is queued before all later work on the current stream."""
        if self._home is not None and at_home(self._home, self._layout, state):
            whole = torch.from_numpy(self.stage.buffer) if self._flat is None else self._flat
            _copy_flat(whole, self._home)
        elif any(_sharded(tensor) for tensor in state.values()):
            for name, tensor in gathered(state):
                if name in self._targets:
                    self._targets[name].copy_(tensor)
        else:
            torch._foreach_copy_(list(self._targets.values()), [state[name] for name in self._targets])
        if self._copied is not None:
            self._copied.record()

    def settle(self) -> Buffer:
        """The bytes in host memory; waits for a copy from the GPU without holding up its other work."""
        if self._stream is not None and self._copied is not None and self._flat is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._copied)
                torch.from_numpy(self.stage.buffer).copy_(self._flat, non_blocking=True)
            self._stream.synchronize()
        return self.stage.buffer

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            t.name: flat[t.offset : t.offset + t.length].view(getattr(torch, t.dtype)).view(t.shape)
            for t in self._layout.tensors
        }


@torch.no_grad()
def gather_home(policy: Policy, layout: Layout) -> Tensor | None:
    """Lay the policy's tensors side by side as the layout says; returns that memory, uint8 [layout.length].

    The same Parameter objects with the same values, so an optimiser does not notice. None if a tensor is sharded, is
    not the policy's own, or is remembered by the policy: then nothing moves, and snapshots copy tensor by tensor.
    """
    own = {
        **dict(policy.named_parameters(remove_duplicate=False)),
        **dict(policy.named_buffers(remove_duplicate=False)),
    }
    state = policy.trainable_state()
    devices = {tensor.device for tensor in state.values()}
    homeless = any(_sharded(t) or n not in own or own[n].data_ptr() != t.data_ptr() for n, t in state.items())
    if homeless or len(devices) != 1:
        return None
    flat = torch.zeros(layout.length, dtype=torch.uint8, device=devices.pop())
    before = {name: own[name].data for name in state}
    for t in layout.tensors:
        place = flat[t.offset : t.offset + t.length].view(own[t.name].dtype).view(t.shape)
        place.copy_(own[t.name])
        own[t.name].data = place
    for name, target in layout.tied.items():
        own[name].data = own[target].data
    if not at_home(flat, layout, policy.trainable_state()):  # it remembers its tensors: leave them where they were
        for name, data in before.items():
            own[name].data = data
        return None
    return flat


def at_home(home: Tensor, layout: Layout, state: Mapping[str, Tensor]) -> bool:
    """Whether every tensor lies where `gather_home` put it."""
    start = home.data_ptr()
    return all(state[t.name].data_ptr() == start + t.offset for t in layout.tensors if t.length)


def gathered(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor whole, one after another, so that no two whole ones are in memory.

    Gathering is a collective: every rank runs through this, in the same order; rank 0 keeps what it yields.
    """
    for name, tensor in state.items():
        yield name, tensor.full_tensor() if _sharded(tensor) else tensor  # type: ignore[attr-defined]


def layout_of(policy: Policy) -> Layout:
    """Where each tensor of the trainable state lies in a version; tied tensors are stored once."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    specs = []
    for name, tensor in policy.trainable_state().items():
        local: Tensor = tensor.to_local() if _sharded(tensor) else tensor  # type: ignore[attr-defined]
        memory = (local.data_ptr(), tensor.dtype, tuple(tensor.shape), local.stride())
        if local.numel() and memory in first:
            tied[name] = first[memory]
            continue
        first[memory] = name
        specs.append((name, dtype_name(tensor.dtype), tuple(tensor.shape)))
    return bundle.plan(specs, tied)


def _copy_flat(target: Tensor, source: Tensor) -> None:
    if source.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())  # the C library's copy, which bypasses the cache; torch's does not
    else:
        target.copy_(source)


def _sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor; importing it costs time that most learners need not spend


def _pin(stage: Stage) -> None:
    """Page-lock the stage, so that the GPU copies into it by itself; a machine that refuses is only slower."""
    if not len(stage.buffer):
        return
    address = torch.from_numpy(stage.buffer).data_ptr()
    refusal = torch.cuda.cudart().cudaHostRegister(address, len(stage.buffer), 0)
    if int(refusal) != 0:
        log.warning("staging memory is not pinned; raise the memlock limit", error=str(refusal))
