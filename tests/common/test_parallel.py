"""Work in parts: every item once, the first error raised, small work without threads."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common import parallel
from services.common.errors import InvalidInput
from services.common.parallel import in_parts


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 10**7), max_size=40), st.integers(1, 4))
def test_every_item_is_worked_on_once(sizes: list[int], threads: int) -> None:
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "THREADS", threads)
        in_parts(sizes, done.extend)
    assert sorted(done) == list(range(len(sizes)))


def test_an_error_is_raised_after_all_threads_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "THREADS", 3)
    before = threading.active_count()

    def work(part: range) -> None:
        if 5 in part:
            raise InvalidInput("item 5")

    with pytest.raises(InvalidInput, match="item 5"):
        in_parts([10**7] * 20, work)
    assert threading.active_count() == before
