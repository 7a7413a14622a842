"""The pool of files: recycling, budget, and no rewriting under a reader, in any order of events."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.errors import InvalidInput
from services.common.flatfile import FlatFile
from services.weights.files import FilePool, lock_holders

BUDGET, MAX_FILES = 10_000, 4
LENGTHS = st.sampled_from([0, 1, 2000, 3000, 7000, 10_000])


class Histories(RuleBasedStateMachine):
    """Take, fill, release, read slowly. A reader must find its bytes unchanged whenever it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="dvla-")
        self.pool = FilePool(Path(self.folder.name), BUDGET, MAX_FILES)
        self.filled: dict[int, tuple[bytes, int]] = {}  # slot -> bytes, generation
        self.reading: list[tuple[FlatFile, bytes]] = []
        self.count = 0

    @rule(length=LENGTHS)
    def fill(self, length: int) -> None:
        number = self.pool.take(length)
        if number is None:
            return
        assert number not in self.filled
        self.count += 1
        data = bytes([self.count % 256]) * length
        slot = self.pool[number]
        slot.file.start(length)
        slot.file.write(0, data)
        self.pool.finish(number)
        self.filled[number] = data, slot.generation

    @precondition(lambda self: self.filled)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.filled)))
        del self.filled[number]
        self.pool.release(number)

    @precondition(lambda self: self.filled)
    @rule(data=st.data())
    def start_reading(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.filled)))
        content, generation = self.filled[number]
        name = self.pool[number].file.name
        self.reading.append((FlatFile.open_shared(self.pool.folder, name, generation, len(content), 0), content))

    @precondition(lambda self: self.reading)
    @rule()
    def stop_reading(self) -> None:
        self.reading.pop(0)[0].close()

    @rule()
    def survey(self) -> None:
        list(self.pool.blocked(0))

    @invariant()
    def readers_see_their_bytes(self) -> None:
        for file, content in self.reading:
            assert file.view.tobytes() == content

    @invariant()
    def limits_hold(self) -> None:
        assert self.pool.reserved() <= BUDGET
        assert len(list(self.pool.folder.iterdir())) <= MAX_FILES

    def teardown(self) -> None:
        for file, _ in self.reading:
            file.close()
        self.pool.close()
        assert not list(self.pool.folder.iterdir())
        self.folder.cleanup()


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestHistories = Histories.TestCase


def test_a_file_is_used_again(tmp_path: Path) -> None:
    pool = FilePool(tmp_path, BUDGET, MAX_FILES)
    for length in (2000, 3000, 10, 0, 9000):
        number = pool.take(length)
        assert number == 0
        pool[number].file.start(length)
        pool.finish(number)
        pool.release(number)
    pool.close()


def test_what_can_never_fit_is_refused(tmp_path: Path) -> None:
    pool = FilePool(tmp_path, BUDGET, MAX_FILES)
    with pytest.raises(InvalidInput, match="larger than the budget"):
        pool.take(BUDGET + 1)
    pool.close()


def test_small_free_files_make_room_for_a_large_one(tmp_path: Path) -> None:
    pool = FilePool(tmp_path, BUDGET, MAX_FILES)
    numbers = [pool.take(3000) for _ in range(3)]
    for number in numbers:
        assert number is not None
        pool[number].file.start(3000)
        pool.finish(number)
    assert pool.take(9000) is None
    for number in numbers:
        assert number is not None
        pool.release(number)
    assert pool.take(9000) is not None
    pool.close()


def test_holders_are_read_from_the_kernels_table(tmp_path: Path) -> None:
    table = tmp_path / "locks"
    table.write_text(
        "1: FLOCK  ADVISORY  READ 4711 00:19:123456 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 12 00:19:123456 0 EOF\n"
        "2: POSIX  ADVISORY  WRITE 99 00:19:123456 0 EOF\n"
        "3: FLOCK  ADVISORY  WRITE -1 00:19:77 0 EOF\n"
    )
    assert lock_holders(table) == {123456: [4711, 12]}
    assert lock_holders(tmp_path / "absent") == {}


def test_what_dead_servers_left_is_removed(tmp_path: Path) -> None:
    dead = FlatFile.create(tmp_path, "weights")
    dead.close()
    pool = FilePool(tmp_path, BUDGET, MAX_FILES)
    assert pool.swept == [dead.name]
    pool.close()
