"""Which versions exist and who may publish or read them: pure state, no bytes, no locks, no clock of its own.

A version is writing, then sealed, then retired. Per model, sealed versions only ever get newer. A version is
retired when `keep` newer ones are sealed and nobody holds it; its slot is then free for another version.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from services.common.bundle import Manifest, Version
from services.common.errors import Exhausted, InvalidInput, NotFound, Superseded

State = Literal["writing", "sealed", "retired"]
MAX_MODELS = 64
MAX_HOLDS = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(eq=False)
class Entry:
    """One version: its manifest, the slot that has its bytes, and who holds it until when (clock seconds)."""

    manifest: Manifest
    slot: int
    state: State = "writing"
    sealed_at: float = 0.0
    holds: dict[str, float] = field(default_factory=dict)
    readers: list[str] = field(default_factory=list)

    @property
    def version(self) -> Version:
        """Its version."""
        return self.manifest.version


@dataclass
class _Shelf:
    """The versions of one model. `entries` are in order of arrival, which for sealed ones is version order."""

    fence: int = 0
    entries: list[Entry] = field(default_factory=list)

    def sealed(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.state == "sealed"]


class Library:
    """All models and their versions. `keep`: how many newest sealed versions of a model stay readable."""

    def __init__(self, keep: int, clock: Callable[[], float]) -> None:
        self._keep = keep
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}

    def fence(self, model: str, epoch: int) -> Version | None:
        """Refuse older epochs from now on; returns the newest version. Raises Superseded for an older epoch."""
        fence = self.fenced(model)
        if epoch < fence:
            raise Superseded(f"epoch {epoch} of {model} is over: epoch {fence} has been fenced; stop this learner")
        self._shelf(model).fence = epoch
        return self.newest(model)

    def fenced(self, model: str) -> int:
        """The epoch below which publishes of this model are refused."""
        return self._shelves[model].fence if model in self._shelves else 0

    def newest(self, model: str) -> Version | None:
        """The newest sealed version, if any."""
        entry = self._newest(model)
        return entry.version if entry else None

    def admit(self, manifest: Manifest) -> bool:
        """May this version be published now? Raises Superseded if its epoch is over or it is not newer.

        False: it is the newest sealed one already, byte for byte. A publisher whose reply got lost sends again.
        """
        model, version = manifest.model, manifest.version
        if version.epoch < self.fenced(model):
            raise Superseded(f"epoch {version.epoch} of {model} is over: epoch {self.fenced(model)} has been fenced")
        newest = self._newest(model)
        if newest is None or version > newest.version:
            return True
        if newest.manifest == manifest:
            return False
        raise Superseded(f"version {version} of {model} is not newer than the newest sealed one, {newest.version}")

    def begin(self, manifest: Manifest, slot: int) -> Entry:
        """Enter an admitted version as writing. Several may be written at once; the first to be sealed wins."""
        self.admit(manifest)
        entry = Entry(manifest, slot)
        self._shelf(manifest.model).entries.append(entry)
        return entry

    def seal(self, entry: Entry) -> list[Entry]:
        """Make it readable, the newest; returns those that this retires. Raises Superseded if it came too late."""
        if entry.state != "writing" or not self.admit(entry.manifest):
            raise Superseded(f"version {entry.version} of {entry.manifest.model} has been sealed already")
        shelf = self._shelf(entry.manifest.model)
        shelf.entries.remove(entry)
        shelf.entries.append(entry)
        shelf.fence = max(shelf.fence, entry.version.epoch)
        entry.state, entry.sealed_at = "sealed", self._clock()
        return self.retire()

    def drop(self, entry: Entry) -> None:
        """Take out a version whose publish was aborted or whose slot is given to another."""
        if entry.state == "sealed":
            raise ValueError(f"version {entry.version} is sealed; retire it first")
        self._shelves[entry.manifest.model].entries.remove(entry)

    def find(self, model: str, version: Version | None = None) -> Entry:
        """A sealed version, by default the newest; raises NotFound, which names the newest."""
        sealed = self._shelves[model].sealed() if model in self._shelves else []
        if not sealed:
            raise NotFound(f"no version of {model!r} has been published")
        for entry in reversed(sealed):
            if version is None or entry.version == version:
                return entry
        raise NotFound(f"version {version} of {model} is not here (any more); the newest is {sealed[-1].version}")

    def hold(self, model: str, version: Version, holder: str, seconds: float) -> None:
        """Keep a version readable for so many seconds from now; 0 lets go. One hold per holder and version."""
        if not 0 <= seconds < 1e9 or not holder:
            raise InvalidInput(f"hold by {holder!r} for {seconds} s; expected a name and 0 to 1e9 seconds")
        entry = self.find(model, version)
        if not seconds:
            entry.holds.pop(holder, None)
        elif holder not in entry.holds and len(entry.holds) >= MAX_HOLDS:
            raise Exhausted(f"version {version} of {model} has {MAX_HOLDS} holders already")
        else:
            entry.holds[holder] = self._clock() + seconds

    def retire(self) -> list[Entry]:
        """Retire what is neither among the newest nor held; returns it. Call now and then: holds expire."""
        return self._retire(self._keep)

    def make_room(self) -> list[Entry]:
        """Slots are short: retire all but the newest and the held versions of every model; returns them."""
        return self._retire(1)

    def entries(self) -> Iterator[Entry]:
        """Every version of every model, newest first."""
        for model in sorted(self._shelves):
            yield from sorted(self._shelves[model].entries, key=lambda entry: entry.version, reverse=True)

    def age(self, entry: Entry) -> float:
        """Seconds since it was sealed."""
        return self._clock() - entry.sealed_at if entry.state != "writing" else 0.0

    def _retire(self, keep: int) -> list[Entry]:
        now = self._clock()
        out: list[Entry] = []
        for shelf in self._shelves.values():
            sealed = shelf.sealed()
            for entry in sealed:
                entry.holds = {holder: until for holder, until in entry.holds.items() if until > now}
            for entry in sealed[:-keep]:
                if not entry.holds:
                    entry.state = "retired"
                    out.append(entry)
        return out

    def _newest(self, model: str) -> Entry | None:
        sealed = self._shelves[model].sealed() if model in self._shelves else []
        return sealed[-1] if sealed else None

    def _shelf(self, model: str) -> _Shelf:
        if not _NAME.fullmatch(model):
            raise InvalidInput(f"model name {model!r}; expected up to 64 letters, digits, dots, dashes, underscores")
        if model not in self._shelves and len(self._shelves) >= MAX_MODELS:
            raise Exhausted(f"{MAX_MODELS} models are here already; {model!r} is one too many")
        return self._shelves.setdefault(model, _Shelf())
