import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.cli.toml import dumps

texts = st.text(st.characters(codec="utf-8"), max_size=20)
plain = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


@given(st.dictionaries(texts, st.dictionaries(texts, values, max_size=4), max_size=3))
def test_what_is_written_is_read_back(recipe: dict[str, dict[str, Any]]) -> None:
    assert tomllib.loads(dumps(recipe)) == recipe


def test_none_is_left_out() -> None:
    assert tomllib.loads(dumps({"learner": {"staleness": None, "updates": 3}})) == {"learner": {"updates": 3}}
