"""The rules of versions: a model of what must hold, driven by random histories, and the corner cases by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.bundle import Manifest, Version, bundle
from services.common.errors import Exhausted, InvalidInput, NotFound, Superseded
from services.weights.library import MAX_HOLDS, MAX_MODELS, Entry, Library

EPOCHS = st.integers(1, 4)
UPDATES = st.integers(0, 6)
HOLDERS = st.sampled_from(["a", "b"])


def manifest(epoch: int, update: int, content: int = 0, model: str = "m") -> Manifest:
    return bundle(model, Version(epoch, update), {"w": np.array([content])})[0]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Histories(RuleBasedStateMachine):
    """Publishes that overlap, abort and come late; fences; holds that expire. Invariants after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.library = Library(2, self.clock)
        self.writing: list[Entry] = []
        self.sealed: list[Version] = []
        self.fence = 0
        self.free: list[Entry] = []
        self.holds: dict[tuple[Version, str], float] = {}

    @rule(epoch=EPOCHS, update=UPDATES)
    def begin(self, epoch: int, update: int) -> None:
        version = Version(epoch, update)
        late = epoch < self.fence or (bool(self.sealed) and version <= self.sealed[-1])
        again = bool(self.sealed) and version == self.sealed[-1] and epoch >= self.fence
        if late and not again:
            with pytest.raises(Superseded):
                self.library.begin(manifest(epoch, update), 0)
        else:
            self.writing.append(self.library.begin(manifest(epoch, update), 0))

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        entry = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        late = entry.version.epoch < self.fence or (bool(self.sealed) and entry.version <= self.sealed[-1])
        if late:
            with pytest.raises(Superseded):
                self.library.seal(entry)
            self.library.drop(entry)
        else:
            self.free += self.library.seal(entry)
            self.sealed.append(entry.version)
            self.fence = max(self.fence, entry.version.epoch)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.library.drop(self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1))))

    @rule(epoch=EPOCHS)
    def raise_fence(self, epoch: int) -> None:
        if epoch < self.fence:
            with pytest.raises(Superseded):
                self.library.fence("m", epoch)
        else:
            assert self.library.fence("m", epoch) == (self.sealed[-1] if self.sealed else None)
            self.fence = epoch

    @precondition(lambda self: self.sealed)
    @rule(data=st.data(), holder=HOLDERS, seconds=st.sampled_from([0, 1, 5]))
    def hold(self, data: st.DataObject, holder: str, seconds: int) -> None:
        version = data.draw(st.sampled_from(self.sealed))
        try:
            self.library.hold("m", version, holder, seconds)
        except NotFound:
            assert version in [entry.version for entry in self.free]
        else:
            self.holds[version, holder] = self.clock.now + seconds

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        self.free += self.library.retire()

    @rule()
    def run_short_of_slots(self) -> None:
        self.free += self.library.make_room()

    @invariant()
    def newest_is_the_last_sealed(self) -> None:
        assert self.library.newest("m") == (self.sealed[-1] if self.sealed else None)
        assert self.sealed == sorted(set(self.sealed))

    @invariant()
    def what_is_free_is_neither_newest_nor_held(self) -> None:
        free = {entry.version for entry in self.free}
        assert len(free) == len(self.free)
        assert not self.sealed or self.sealed[-1] not in free
        for entry in self.free:
            with pytest.raises(NotFound):
                self.library.find("m", entry.version)
        for version in set(self.sealed) - free:
            assert self.library.find("m", version).version == version

    @invariant()
    def holds_are_kept(self) -> None:
        free = {entry.version for entry in self.free}
        assert not [v for (v, _), until in self.holds.items() if until > self.clock.now and v in free]


TestHistories = Histories.TestCase


def seal(library: Library, epoch: int, update: int) -> list[Version]:
    return [entry.version for entry in library.seal(library.begin(manifest(epoch, update), 0))]


def test_the_newest_two_stay_and_older_ones_are_retired() -> None:
    library = Library(2, Clock())
    assert [seal(library, 1, update) for update in range(4)] == [[], [], [Version(1, 0)], [Version(1, 1)]]
    with pytest.raises(NotFound, match="the newest is 1-3"):
        library.find("m", Version(1, 0))


def test_a_hold_keeps_a_version_until_it_expires() -> None:
    clock = Clock()
    library = Library(1, clock)
    seal(library, 1, 0)
    library.hold("m", Version(1, 0), "eval", 10)
    assert seal(library, 1, 1) == []
    assert library.make_room() == []
    clock.now = 9
    library.hold("m", Version(1, 0), "eval", 10)  # renewed
    clock.now = 18
    assert library.retire() == []
    clock.now = 19
    assert [entry.version for entry in library.retire()] == [Version(1, 0)]


def test_the_same_version_again_is_a_repeat_only_with_the_same_content() -> None:
    library = Library(2, Clock())
    seal(library, 1, 0)
    assert library.admit(manifest(1, 0)) is False
    with pytest.raises(Superseded, match="not newer"):
        library.admit(manifest(1, 0, content=1))
    with pytest.raises(Superseded, match="not newer"):
        library.admit(replace(manifest(1, 0), metadata={"temperature": "2"}))


def test_a_slow_publish_of_an_older_epoch_cannot_be_sealed() -> None:
    library = Library(2, Clock())
    slow = library.begin(manifest(1, 9), 0)
    library.fence("m", 2)
    with pytest.raises(Superseded, match="epoch 1 of m is over"):
        library.seal(slow)


def test_an_unsealed_publish_does_not_fence() -> None:
    library = Library(2, Clock())
    library.drop(library.begin(manifest(2**60, 0), 0))
    seal(library, 1, 0)
    assert library.newest("m") == Version(1, 0)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".lock", "a\n", "ü", "x" * 65])
def test_names_that_could_be_paths_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="model name"):
        Library(2, Clock()).fence(name, 1)


def test_models_and_holders_are_bounded() -> None:
    library = Library(2, Clock())
    for number in range(MAX_MODELS):
        library.fence(f"m{number}", 1)
    with pytest.raises(Exhausted, match="one too many"):
        library.fence("other", 1)
    library.seal(library.begin(manifest(1, 0, model="m0"), 0))
    for number in range(MAX_HOLDS):
        library.hold("m0", Version(1, 0), f"h{number}", 1)
    with pytest.raises(Exhausted, match="holders already"):
        library.hold("m0", Version(1, 0), "other", 1)
    for seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(InvalidInput):
            library.hold("m0", Version(1, 0), "h0", seconds)
