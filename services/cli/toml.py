"""Writes the few kinds of values that recipes hold as TOML; the standard library only reads it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def dumps(recipe: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of keys as TOML text. None is left out, because TOML has no such value."""
    parts = []
    for section, values in recipe.items():
        lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None]
        parts.append("\n".join([f"[{_key(section)}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _key(name: str) -> str:
    plain = name and all((c.isalnum() and c.isascii()) or c in "_-" for c in name)
    return name if plain else _text(name)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, except that DEL must be escaped and surrogate pairs must not be.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        # TOML wants a digit on both sides of the point, and writes the special ones without quotes.
        return repr(value) if math.isfinite(value) else {"inf": "inf", "-inf": "-inf"}.get(repr(value), "nan")
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(str(key))} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"{value!r} has no TOML form")
