"""Prints the third-party requirements of some extras of pyproject.toml, one a line.

    python3 requirements.py pyproject.toml store,weights

Images install these before the source is copied in, so that a change of source does not install them again.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str]) -> list[str]:
    """The project's own requirements and those of the extras; extras that name extras are followed."""
    tables = project["optional-dependencies"]
    base = project["dependencies"]
    assert isinstance(tables, dict)
    assert isinstance(base, list)
    found: list[str] = list(base)
    waiting, seen = list(extras), set[str]()
    while waiting:
        extra = waiting.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in tables:
            sys.exit(f"pyproject.toml has no extra {extra!r}; it has {', '.join(tables)}")
        for requirement in tables[extra]:
            own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement)
            if own:
                waiting += own[1].split(",")
            else:
                found.append(requirement)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    parsed = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    print("\n".join(requirements(parsed, [extra for extra in sys.argv[2].split(",") if extra])))
