"""Random histories of one arena: extents never overlap, bytes that count stay, and all room comes back."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.arena import Arena, Extent, Lease, Peer
from services.common.errors import Exhausted

SIZE = 4096


class Histories(RuleBasedStateMachine):
    """Each extent is filled with a byte of its own generation."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.arena, self.peer = Arena.create(self.folder, "test", SIZE, entries=8), Peer(self.folder)
        self.live: dict[int, Extent] = {}
        self.sealed: set[int] = set()
        self.reading: list[tuple[Lease, int]] = []

    def chosen(self, data: st.DataObject, sealed: bool) -> Extent | None:
        fitting = sorted(self.sealed if sealed else self.live.keys() - self.sealed)
        return self.live[data.draw(st.sampled_from(fitting))] if fitting else None

    @rule(length=st.integers(0, 1500))
    def allocate(self, length: int) -> None:
        try:
            extent = self.arena.allocate(length)
        except Exhausted:
            return
        self.live[extent.generation] = extent
        with self.peer.write(extent) as lease:
            lease.view[:] = extent.generation % 251

    @rule(data=st.data(), share=st.floats(0, 1))
    def shrink(self, data: st.DataObject, share: float) -> None:
        if extent := self.chosen(data, sealed=False):
            self.live[extent.generation] = self.arena.shrink(extent, int(extent.length * share))

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        if extent := self.chosen(data, sealed=False):
            self.arena.seal(extent)
            self.sealed.add(extent.generation)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if extent := self.chosen(data, sealed=True):
            self.reading.append((self.peer.read(extent), extent.generation))

    @precondition(lambda self: self.reading)
    @rule()
    def stop_reading(self) -> None:
        self.reading.pop()[0].close()

    @rule(data=st.data(), sealed=st.booleans())
    def release(self, data: st.DataObject, sealed: bool) -> None:
        if extent := self.chosen(data, sealed):
            del self.live[extent.generation]
            self.sealed.discard(extent.generation)
            being_read = extent.generation in {generation for _, generation in self.reading}
            assert self.arena.release(extent) is not being_read

    @rule()
    def sweep(self) -> None:
        assert {extent.generation for extent in self.arena.sweep(0)} == self.live.keys() - self.sealed
        self.live = {generation: self.live[generation] for generation in self.sealed}

    @rule()
    def change_owner(self) -> None:
        self.arena.close()
        adopted = Arena.adopt(self.arena.path)
        assert adopted is not None
        self.arena = adopted

    @invariant()
    def bytes_that_count_are_untouched(self) -> None:
        for generation, extent in self.live.items():
            assert (self.arena.view(extent) == generation % 251).all()
        for lease, generation in self.reading:
            assert (lease.view == generation % 251).all()

    @invariant()
    def what_the_arena_says_is_so(self) -> None:
        stated = {extent.generation: (extent, sealed) for extent, sealed in self.arena.extents()}
        assert stated == {key: (extent, key in self.sealed) for key, extent in self.live.items()}

    def teardown(self) -> None:
        for lease, _ in self.reading:
            lease.close()
        for extent in self.live.values():
            self.arena.release(extent)
        self.arena.collect()
        assert self.arena.free == SIZE
        self.arena.remove()
        self.peer.close()
        shutil.rmtree(self.folder)


Histories.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase
