"""The one pause that publishing costs training: a flat copy of the trainable state into a staging buffer.

On a GPU the copy stays on the device; `Staging.settle` brings it to pinned memory on a side stream, in lane 4.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.common import bundle
from services.common.bundle import Buffer, Layout
from services.policies.base import Policy
from services.policies.raw import dtype_name


class Staging:
    """Room for one version: a flat buffer with a view per tensor, allocated once and reused."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._host = torch.zeros(layout.length, dtype=torch.uint8, pin_memory=self._stream is not None)
        self._flat = torch.zeros(layout.length, dtype=torch.uint8, device=device) if self._stream else self._host
        self._views = {
            t.name: self._flat[t.offset : t.offset + t.length].view(getattr(torch, t.dtype)).view(t.shape)
            for t in layout.tensors
        }

    @torch.no_grad()
    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Copy the state. On a GPU the copy is queued before all later work on the current stream."""
        torch._foreach_copy_(list(self._views.values()), [state[name] for name in self._views])
        if self._copied is not None:
            self._copied.record()

    def settle(self) -> Buffer:
        """The bytes in host memory; waits for a copy from the GPU without holding up its other work."""
        if self._stream is not None and self._copied is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._copied)
                self._host.copy_(self._flat, non_blocking=True)
            self._stream.synchronize()
        flat: npt.NDArray[np.uint8] = self._host.numpy()
        return flat


def layout_of(policy: Policy) -> Layout:
    """Where each tensor of the trainable state lies in a version; tied tensors are stored once."""
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    specs = []
    for name, tensor in policy.trainable_state().items():
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and memory in first:
            tied[name] = first[memory]
            continue
        first[memory] = name
        specs.append((name, dtype_name(tensor.dtype), tuple(tensor.shape)))
    return bundle.plan(specs, tied)
