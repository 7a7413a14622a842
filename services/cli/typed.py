"""Tables of a recipe into frozen dataclasses: unknown keys and wrong types are one clear line each.

`build(SimConfig, "sim", {"slots": 4})` makes a `SimConfig`. What values mean together is checked by the class itself.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from services.common.config import check_keys, field_names
from services.common.errors import ConfigError

T = TypeVar("T")


def build(cls: type[T], section: str, values: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> T:
    """The section as an instance of `cls`; raises ConfigError naming section, key, value and expectation.

    given: fields that the caller knows and the recipe must not set.
    """
    known = [name for name in field_names(cls) if name not in (given or {})]
    check_keys(section, dict(values), known)
    hints = get_type_hints(cls)
    converted = {key: convert(hints[key], f"[{section}] {key}", value) for key, value in values.items()}
    missing = [f.name for f in fields(cls) if _required(f) and f.name not in converted and f.name not in (given or {})]  # type: ignore[arg-type]
    if missing:
        raise ConfigError(f"[{section}] {missing[0]} is missing; give it in the recipe")
    try:
        return cls(**converted, **(given or {}))
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("[") else f"[{section}] {text}") from error


def convert(hint: Any, what: str, value: Any) -> Any:
    """`value`, as TOML gave it, as the type of a field; raises ConfigError if it does not fit."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, what, value)
    if origin is Literal:
        return value if value in arguments else _refuse(what, value, f"one of {', '.join(map(str, arguments))}")
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            _refuse(what, value, "a list")
        return tuple(convert(arguments[0], what, item) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return dict(value) if isinstance(value, Mapping) else _refuse(what, value, "a table")
    return _convert_plain(hint, what, value)


def _convert_plain(hint: Any, what: str, value: Any) -> Any:
    if hint is bool:
        return value if isinstance(value, bool) else _refuse(what, value, "true or false")
    if hint is float:
        return float(value) if _is_number(value) else _refuse(what, value, "a number")
    if hint is int:
        return value if _is_number(value) and isinstance(value, int) else _refuse(what, value, "a whole number")
    if hint is str:
        return value if isinstance(value, str) else _refuse(what, value, "a text")
    if hint is Path:
        return Path(value) if isinstance(value, str | Path) else _refuse(what, value, "a path")
    return value


def _convert_union(arguments: tuple[Any, ...], what: str, value: Any) -> Any:
    problem: ConfigError | None = None
    for hint in arguments:
        if hint is type(None):
            if value is None:
                return None
            continue
        try:
            return convert(hint, what, value)
        except ConfigError as error:
            problem = error
    raise problem or ConfigError(f"{what} = {value!r} does not fit")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _refuse(what: str, value: Any, expected: str) -> NoReturn:
    raise ConfigError(f"{what} = {value!r}; expected {expected}")
