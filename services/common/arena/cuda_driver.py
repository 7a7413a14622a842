"""The CUDA calls that the CUDA IPC arena needs, through ctypes on libcudart. The only lines that need a GPU.

Written, not yet run on a GPU. Everything else in this package is tested with a driver that plays these calls on the
CPU; `CudaDriver` is what such a driver has to offer.
"""

import ctypes
from typing import Protocol

from services.common.errors import Unavailable, Unsupported

HANDLE_BYTES = 64
"""Size of cudaIpcMemHandle_t and of cudaIpcEventHandle_t."""
_DISABLE_TIMING, _INTERPROCESS = 2, 4
_LAZY_PEER_ACCESS = 1
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_LIBRARIES = ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")


class CudaDriver(Protocol):
    """Memory and events of one device. Addresses, events and handles are opaque to everyone else."""

    uuid: str
    """Of the device, as nvidia-smi writes it: GPU-..."""

    def malloc(self, size: int) -> int:
        """New device memory."""

    def free(self, address: int) -> None:
        """Give it back."""

    def export_memory(self, address: int) -> bytes:
        """A handle for another process."""

    def open_memory(self, handle: bytes) -> int:
        """Map another process's memory."""

    def close_memory(self, address: int) -> None:
        """Unmap it."""

    def make_event(self) -> int:
        """An event that another process can wait for."""

    def export_event(self, event: int) -> bytes:
        """A handle of it."""

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""

    def destroy_event(self, event: int) -> None:
        """Let go of an event, made or opened."""

    def record(self, event: int) -> None:
        """The event stands for all work queued so far."""

    def wait(self, event: int) -> None:
        """Later work waits for the event's work; the caller does not."""

    def to_device(self, address: int, data: memoryview) -> None:
        """Queue a copy of host bytes to the device."""

    def to_host(self, data: memoryview, address: int) -> None:
        """Queue a copy of device bytes to the host."""

    def on_device(self, target: int, source: int, length: int) -> None:
        """Queue a copy on the device."""

    def synchronise(self) -> None:
        """Wait for all work queued so far."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class Cudart:
    """`CudaDriver` on the CUDA runtime. Memory comes from plain cudaMalloc, which can be shared; torch's may not be.

    Copies and events use the legacy default stream, so they come after what torch queued there.
    """

    def __init__(self, device: int, uuid: str) -> None:
        """uuid: as `torch.cuda.get_device_properties(device).uuid` or nvidia-smi states it, with "GPU-"."""
        self.uuid = uuid
        self._lib = _library()
        self._call("cudaSetDevice", ctypes.c_int(device))

    def malloc(self, size: int) -> int:
        """New device memory."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        """Give it back."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def export_memory(self, address: int) -> bytes:
        """A handle for another process."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(memoryview(handle).cast("B"))

    def open_memory(self, handle: bytes) -> int:
        """Map another process's memory."""
        address = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return int(address.value or 0)

    def close_memory(self, address: int) -> None:
        """Unmap it."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def make_event(self) -> int:
        """An event that another process can wait for."""
        event = ctypes.c_void_p()
        flags = ctypes.c_uint(_DISABLE_TIMING | _INTERPROCESS)
        self._call("cudaEventCreateWithFlags", ctypes.byref(event), flags)
        return int(event.value or 0)

    def export_event(self, event: int) -> bytes:
        """A handle of it."""
        handle = _Handle()
        self._call("cudaIpcGetEventHandle", ctypes.byref(handle), ctypes.c_void_p(event))
        return bytes(memoryview(handle).cast("B"))

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""
        event = ctypes.c_void_p()
        self._call("cudaIpcOpenEventHandle", ctypes.byref(event), _Handle.from_buffer_copy(handle))
        return int(event.value or 0)

    def destroy_event(self, event: int) -> None:
        """Let go of an event, made or opened."""
        self._call("cudaEventDestroy", ctypes.c_void_p(event))

    def record(self, event: int) -> None:
        """The event stands for all work queued so far."""
        self._call("cudaEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(0))

    def wait(self, event: int) -> None:
        """Later work waits on the device for the event's work; the caller does not."""
        self._call("cudaStreamWaitEvent", ctypes.c_void_p(0), ctypes.c_void_p(event), ctypes.c_uint(0))

    def to_device(self, address: int, data: memoryview) -> None:
        """Copy host bytes to the device."""
        source = (ctypes.c_char * len(data)).from_buffer(data) if not data.readonly else bytes(data)
        self._copy(ctypes.c_void_p(address), source, len(data), _TO_DEVICE)

    def to_host(self, data: memoryview, address: int) -> None:
        """Copy device bytes to the host; done when this returns."""
        self._copy((ctypes.c_char * len(data)).from_buffer(data), ctypes.c_void_p(address), len(data), _TO_HOST)

    def on_device(self, target: int, source: int, length: int) -> None:
        """Queue a copy on the device."""
        self._copy(ctypes.c_void_p(target), ctypes.c_void_p(source), length, _ON_DEVICE)

    def synchronise(self) -> None:
        """Wait for all work queued so far."""
        self._call("cudaStreamSynchronize", ctypes.c_void_p(0))

    def _copy(self, target: object, source: object, length: int, kind: int) -> None:
        self._call("cudaMemcpyAsync", target, source, ctypes.c_size_t(length), ctypes.c_int(kind), ctypes.c_void_p(0))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            self._lib.cudaGetErrorString.restype = ctypes.c_char_p
            text = self._lib.cudaGetErrorString(code).decode()
            raise Unavailable(f"{name} failed on {self.uuid}: {text} ({code})")


def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unsupported(f"the CUDA runtime is not here (tried {', '.join(_LIBRARIES)}); install it, or use transport shm")
