from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from services.cli.typed import build
from services.common.errors import ConfigError


@dataclass(frozen=True)
class Section:
    size: int
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    on: bool = False
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size = {self.size}; expected 1 or more")


def test_values_are_converted() -> None:
    section = build(Section, "s", {"size": 2, "rate": 1, "names": ["x"], "seed": 3, "options": {"deep": 1}})
    assert section == Section(2, 1.0, "a", ("x",), False, 3, {"deep": 1})
    assert isinstance(section.rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 1, "rat": 2}, "unknown key 'rat' in [s] of the recipe; did you mean 'rate'?"),
        ({"size": "many"}, "[s] size = 'many'; expected a whole number"),
        ({"size": True}, "[s] size = True; expected a whole number"),
        ({"size": 1.5}, "[s] size = 1.5; expected a whole number"),
        ({"size": 1, "rate": "fast"}, "[s] rate = 'fast'; expected a number"),
        ({"size": 1, "kind": "c"}, "[s] kind = 'c'; expected one of a, b"),
        ({"size": 1, "names": "x"}, "[s] names = 'x'; expected a list"),
        ({"size": 1, "names": [1]}, "[s] names = 1; expected a text"),
        ({"size": 1, "on": "yes"}, "[s] on = 'yes'; expected true or false"),
        ({"size": 1, "options": 3}, "[s] options = 3; expected a table"),
        ({"size": 1, "seed": "x"}, "[s] seed = 'x'; expected a whole number"),
        ({}, "[s] size is missing; give it in the recipe"),
        ({"size": 0}, "[s] size = 0; expected 1 or more"),
    ],
)
def test_what_does_not_fit_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Section, "s", values)
    assert str(caught.value) == message


def test_what_the_launcher_gives_cannot_be_set() -> None:
    assert build(Section, "s", {}, given={"size": 4}).size == 4
    with pytest.raises(ConfigError, match="unknown key 'size'"):
        build(Section, "s", {"size": 1}, given={"size": 4})
