"""What the parts of a learner's settings share: refusals that name setting, value and remedy."""

from typing import Any, NoReturn

from services.common.errors import ConfigError


class Checked:
    """Checks of a dataclass's own fields."""

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            self._refuse(name, f"one of {', '.join(allowed)}")

    def _at_least(self, name: str, low: float, reason: str = "") -> None:
        value = getattr(self, name)
        if not low <= value < float("inf"):
            self._refuse(name, f"{low} or more{', ' + reason if reason else ''}")

    def _above(self, name: str, low: float) -> None:
        if not low < getattr(self, name) < float("inf"):
            self._refuse(name, f"more than {low}")

    def _unless(self, name: str, read: bool, reader: str) -> None:
        """A setting that nothing reads here must keep its default: else somebody would believe in it."""
        if not read and getattr(self, name) != getattr(type(self), name):
            self._refuse(name, f"no such setting unless {reader}, which alone reads it; leave it out")

    def _refuse(self, name: str, expected: str) -> NoReturn:
        value: Any = getattr(self, name)
        raise ConfigError(f"learner setting {name} = {value!r}; expected {expected}")
