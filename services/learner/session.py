"""The run as this learner opened it: the epoch, whether the store still knows it, and what was trained of it."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

log = structlog.get_logger()

REMEMBERED_UPDATES = 64
"""Updates whose groups are remembered beyond a confirmed ack: a Redis that fell back may offer them again."""


class Session:
    """Epoch and health of the run. Lanes call with the epoch they saw; what they report of an old one is stale."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usable = threading.Event()
        self._losses = 0
        self.epoch = 0

    def grant(self, epoch: int) -> None:
        """The store granted this epoch; lanes still hold."""
        with self._lock:
            self.epoch = epoch

    def open(self) -> None:
        """Weights of this epoch are published: lanes go on."""
        self._usable.set()

    def report_lost(self, epoch: int, reason: str) -> None:
        """The store does not know the run of `epoch` as we do; lanes hold until the loop has opened it again."""
        with self._lock:
            if epoch == self.epoch and self._usable.is_set():
                log.warning("the store lost this run", epoch=epoch, reason=reason)
                self._losses += 1
                self._usable.clear()

    def confirm(self) -> None:
        """The store recorded an update: it is well."""
        self._losses = 0

    @property
    def losses(self) -> int:
        """Losses since the store last recorded an update."""
        return self._losses

    @property
    def usable(self) -> bool:
        """False from a reported loss until the run is open again."""
        return self._usable.is_set()

    def wait_usable(self, seconds: float) -> bool:
        """Wait for it."""
        return self._usable.wait(seconds)


class Consumed:
    """Groups by the update that trained them, as far as the store may offer them again. Thread-safe.

    acked: update of the last confirmed ack.
    """

    def __init__(self, updates: Mapping[int, Sequence[int]] | None = None, acked: int = 0) -> None:
        self._lock = threading.Lock()
        self._updates = {update: tuple(groups) for update, groups in (updates or {}).items()}
        self._acked = acked

    def add(self, update: int, groups: Sequence[int]) -> None:
        """Update number `update` trained these groups."""
        with self._lock:
            self._updates[update] = tuple(groups)

    def update_of(self, group: int) -> int | None:
        """The update that trained this group; None if it was not trained or is long acked."""
        with self._lock:
            return next((update for update, groups in self._updates.items() if group in groups), None)

    def unconfirmed(self) -> list[tuple[int, tuple[int, ...]]]:
        """Updates since the last confirmed ack, with their groups: the store may not have heard of them."""
        with self._lock:
            return sorted((update, groups) for update, groups in self._updates.items() if update > self._acked)

    def confirm_ack(self, update: int) -> None:
        """The store confirmed the ack of a durable checkpoint of `update`: forget what is far behind it."""
        with self._lock:
            self._acked = max(self._acked, update)
            horizon = update - REMEMBERED_UPDATES
            self._updates = {number: groups for number, groups in self._updates.items() if number > horizon}

    def copy(self) -> "Consumed":
        """As it is now, for a checkpoint."""
        with self._lock:
            return Consumed(self._updates, self._acked)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        with self._lock:
            groups = {str(update): list(groups) for update, groups in self._updates.items()}
            return {"acked": self._acked, "groups": groups}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Consumed":
        """The inverse of `to_json`."""
        return cls({int(update): tuple(groups) for update, groups in data["groups"].items()}, int(data["acked"]))
