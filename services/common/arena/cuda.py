"""CUDA IPC arena: one long-lived allocation on one GPU, slots in it, one interprocess event for each slot.

Written, not yet run on a GPU: the calls are in `cuda_driver`, everything here is tested with a driver on the CPU.

The producer writes a slot, records its event and makes its sequence number even again. A consumer maps the arena once
per session, waits (on the device) for the slot's event, copies out on the device, synchronises, and compares the
sequence number, which lies in a host file that both map, before and after: a copy that was torn is refused. Nobody uses
the producer's memory in place. Each consumer session gets a fresh export; kernel locks, not CUDA's counts, say whether
a slot's reader lives, so a killed consumer frees its slot and a stopped one keeps it: the producer never waits.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from dvla.v1 import common_pb2 as pb

from services.common.arena.cuda_driver import HANDLE_BYTES, CudaDriver
from services.common.arena.cuda_limits import impossible
from services.common.arena.owner import Arena
from services.common.arena.peer import Lease, Peer
from services.common.arena.space import rounded
from services.common.arena.table import Extent
from services.common.errors import Exhausted, InvalidInput, NotFound, Unsupported

_WORD = 8
"""Bytes of a sequence number."""


@dataclass(frozen=True)
class Slot:
    """What is written into one slot. sequence: even, of the finished writing."""

    number: int
    length: int
    sequence: int


class CudaArena:
    """The producer's side. Thread-safe. `host`: an arena of its own, never swept, for sequence numbers and locks.

    Raises Unsupported if this machine's GPU memory cannot be shared, with the reason.
    """

    def __init__(self, driver: CudaDriver, host: Arena, slots: int, slot_bytes: int) -> None:
        reason = impossible(driver.uuid)
        if reason:
            raise Unsupported(f"no cuda_ipc: {reason}")
        self._driver, self._host = driver, host
        self._room, self._slots = rounded(slot_bytes), slots
        self.size = slots * self._room
        self.session = int.from_bytes(os.urandom(7), "little")  # handles of an earlier arena are void
        self._words = [host.allocate(_WORD) for _ in range(slots)]
        for word in self._words:
            _sequence(host.view(word))[0] = 0
        self._address = driver.malloc(self.size)
        self._events = [driver.make_event() for _ in range(slots)]
        self._next = 0
        self._lock = threading.Lock()

    def write(self, data: memoryview) -> Slot:
        """Copy host bytes into a slot that nobody reads. Raises Exhausted if all are being read."""
        with self.writing(len(data)) as (address, slot):
            self._driver.to_device(address, data)
        return slot()

    @contextmanager
    def writing(self, length: int) -> Iterator[tuple[int, "_Later"]]:
        """A slot's device address to write to; the slot is finished at the end of the block, or left void by an error.

        Yields the address and a function that gives the finished slot.
        """
        if length > self._room:
            raise InvalidInput(f"{length} bytes do not fit into a slot of {self._room}")
        with self._lock:
            number = self._free()
            word, later = _sequence(self._host.view(self._words[number])), _Later()
            word[0] += 1 + int(word[0]) % 2  # odd: being written; so it stays if the block fails
            yield self._address + number * self._room, later
            self._driver.record(self._events[number])
            word[0] += 1
            later.slot = Slot(number, length, int(word[0]))

    def message(self, slot: Slot, first: bool) -> pb.CudaExtent:
        """For the wire. first: the first message of a consumer's session, which carries a fresh handle of the memory.

        The slot's event handle goes with every message; a consumer opens each event once.
        """
        return pb.CudaExtent(
            gpu_uuid=self._driver.uuid,
            memory_handle=self._driver.export_memory(self._address) if first else b"",
            event_handle=self._driver.export_event(self._events[slot.number]),
            offset=slot.number * self._room,
            length=slot.length,
            sequence=slot.sequence,
            session=self.session,
            size=self.size,
            slot=slot.number,
            word=self._words[slot.number].message(),
        )

    def close(self) -> None:
        """Free everything; consumers have to have closed first, or their mappings become invalid."""
        with self._lock:
            for event in self._events:
                self._driver.destroy_event(event)
            for word in self._words:
                self._host.release(word)
            if self._address:
                self._driver.synchronise()
                self._driver.free(self._address)
            self._address, self._events, self._words = 0, [], []

    def _free(self) -> int:
        for step in range(self._slots):
            number = (self._next + step) % self._slots
            if not self._host.held(self._words[number]):
                self._next = number + 1
                return number
        raise Exhausted(f"all {self._slots} slots of the CUDA arena are being read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Later:
    """The slot, once it is finished."""

    slot: Slot | None = None

    def __call__(self) -> Slot:
        if self.slot is None:
            raise NotFound("the slot is not finished")
        return self.slot


class CudaReader:
    """The consumer's side of one session with one producer. Not thread-safe."""

    def __init__(self, driver: CudaDriver, peer: Peer, first: pb.CudaExtent) -> None:
        """Map the producer's arena, once. Raises Unsupported for another GPU, Unavailable if CUDA refuses it."""
        if first.gpu_uuid != driver.uuid:
            raise Unsupported(f"memory of GPU {first.gpu_uuid} cannot be opened on {driver.uuid}")
        if len(first.memory_handle) != HANDLE_BYTES:
            raise InvalidInput(f"a memory handle has {len(first.memory_handle)} bytes; expected {HANDLE_BYTES}")
        self._driver, self._peer = driver, peer
        self._session, self._size = first.session, first.size
        self._events: dict[int, int] = {}
        self._address = driver.open_memory(first.memory_handle)

    def copy(self, message: pb.CudaExtent, target: int) -> None:
        """Copy a slot to device memory at `target`, of at least its length; done when this returns.

        Raises NotFound if the slot was, or is being, written anew; InvalidInput if the handle makes no sense.
        """
        with self._holding(message):
            self._driver.wait(self._event(message))
            self._driver.on_device(target, self._address + message.offset, message.length)
            self._driver.synchronise()

    def copy_to_host(self, message: pb.CudaExtent, target: memoryview) -> None:
        """The same to host memory."""
        with self._holding(message):
            self._driver.wait(self._event(message))
            self._driver.to_host(target[: message.length], self._address + message.offset)
            self._driver.synchronise()

    def close(self) -> None:
        """Unmap; the producer may free its memory after that."""
        for event in self._events.values():
            self._driver.destroy_event(event)
        self._events.clear()
        if self._address:
            self._driver.close_memory(self._address)
            self._address = 0

    @contextmanager
    def _holding(self, message: pb.CudaExtent) -> Iterator[None]:
        """Under the slot's lock: its sequence number is that of the message before and after."""
        if message.session != self._session or message.gpu_uuid != self._driver.uuid:
            raise NotFound(f"the slot belongs to session {message.session} on {message.gpu_uuid}, which is over")
        if message.offset + message.length > self._size or message.sequence % 2 or message.word.length != _WORD:
            raise InvalidInput(
                f"slot {message.slot} lies outside of the arena's {self._size} bytes, or is not finished"
            )
        lease: Lease = self._peer.read(Extent.of(message.word), sealed=False)
        with lease:
            word = _sequence(lease.view)
            _unchanged(word, message)
            yield
            _unchanged(word, message)

    def _event(self, message: pb.CudaExtent) -> int:
        if message.slot not in self._events:
            if len(message.event_handle) != HANDLE_BYTES:
                raise InvalidInput(f"an event handle has {len(message.event_handle)} bytes; expected {HANDLE_BYTES}")
            self._events[message.slot] = self._driver.open_event(message.event_handle)
        return self._events[message.slot]


def _sequence(view: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return view.view(np.uint64)


def _unchanged(word: npt.NDArray[np.uint64], message: pb.CudaExtent) -> None:
    if int(word[0]) != message.sequence:
        raise NotFound(f"slot {message.slot} was written anew: sequence {int(word[0])}, expected {message.sequence}")
