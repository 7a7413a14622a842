"""The store's rules in plain Python, as DESIGN states them: what every call must answer. No Redis, no scripts.

It recomputes everything from the state of groups and members; it keeps no queues, so it shares no cleverness with
the scripts. Times are milliseconds.
"""

from dataclasses import dataclass, field
from typing import Literal

MAX_EXPIRIES = 8
MAX_OUTSIDE = 32
LIFETIMES = 20

Where = Literal["open", "ready", "leased", "trained", "dead"]


@dataclass
class Member:
    attempt: int = 0
    holder: str = ""
    ends: int = 0  # end of the grant's lifetime
    failed_attempt: int = 0
    failures: int = 0
    given_back: int = 0
    expiries: int = 0
    given_up: bool = False
    score: float | None = None  # set when filled
    oldest: int = 0


@dataclass
class Group:
    number: int
    members: list[Member]
    where: Where = "open"
    update: int = 0  # that it made

    @property
    def complete(self) -> bool:
        return all(member.score is not None for member in self.members)


@dataclass(frozen=True)
class Rules:
    group_size: int
    groups_per_update: int
    staleness: int
    total_updates: int
    filter_uniform: bool
    max_attempts: int
    on_failure: str
    grant_ms: int


@dataclass
class Model:
    rules: Rules
    now: int = 0
    epoch: int = 0
    update: int = 0
    last_group: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    stream: list[int] = field(default_factory=list)  # numbers in stream order, as long as they are not acked or dead
    cursor: int = 0  # entries of the stream that this epoch has delivered
    workers: dict[str, int] = field(default_factory=dict)  # name -> silent from, in order of arrival
    counters: dict[str, int] = field(default_factory=dict)

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def live(self) -> list[int]:
        """Numbers in admission order."""
        return sorted(n for n, group in self.groups.items() if group.where in ("open", "ready", "leased"))

    # Workers

    def expire(self) -> None:
        for worker in [name for name, until in self.workers.items() if until < self.now]:
            del self.workers[worker]
        for number in sorted(self.groups):
            for member in self.groups[number].members if number in self.groups else []:
                if member.holder and (member.holder not in self.workers or member.ends < self.now):
                    self._expire_member(number, member)

    def _expire_member(self, number: int, member: Member) -> None:
        member.holder = ""
        member.expiries += 1
        self.count("expired")
        if member.expiries >= MAX_EXPIRIES:
            self._give_up(number, member)

    def seen(self, worker: str) -> None:
        self.workers[worker] = self.now + self.rules.grant_ms

    def admissible(self, rank: int, weights: int) -> bool:
        b = self.rules.groups_per_update
        bound = min((self.rules.staleness + weights + 1) * b, self.rules.total_updates * b)
        return self.update * b + rank < bound

    def next_jobs(self, worker: str, weights: int, count: int) -> tuple[list[tuple[int, int, int]], str]:
        self.expire()
        self.seen(worker)
        jobs: list[tuple[int, int, int]] = []
        while len(jobs) < count:
            live = self.live()
            free = [(n, m) for n in live for m, member in enumerate(self.groups[n].members) if self._is_free(member)]
            rank = live.index(free[0][0]) if free else len(live)
            if not self.admissible(rank, self.update):
                return jobs, "admission"
            if not self.admissible(rank, min(weights, self.update)):
                return jobs, "weights"
            if not free:
                self.last_group += 1
                self.groups[self.last_group] = Group(self.last_group, [Member() for _ in range(self.rules.group_size)])
                self.count("admitted")
                continue
            number, index = free[0]
            member = self.groups[number].members[index]
            member.attempt += 1
            member.holder = worker
            member.ends = self.now + self.rules.grant_ms * LIFETIMES * 2 ** min(member.attempt - 1, 16)
            jobs.append((number, index, member.attempt))
        return jobs, ""

    @staticmethod
    def _is_free(member: Member) -> bool:
        return not member.holder and member.score is None

    def append(self, job: tuple[int, int, int], score: float, oldest: int) -> str:
        number, index, attempt = job
        group = self.groups.get(number)
        member = group.members[index] if group else Member()
        if member.attempt != attempt or member.failed_attempt == attempt or member.given_up:
            self.count("superseded")
            return "superseded"
        if member.score is not None:
            self.count("repeated")
            return "repeated"
        if member.holder:
            self.seen(member.holder)
        member.holder, member.score, member.oldest = "", score, oldest
        self.count("accepted")
        self._filled(number)
        return "accepted"

    def fail(self, job: tuple[int, int, int], outside: bool = False) -> str:
        number, index, attempt = job
        group = self.groups.get(number)
        member = group.members[index] if group else Member()
        if group and member.failed_attempt == attempt:
            return "ok"
        if member.attempt != attempt or member.score is not None:
            self.count("superseded")
            return "superseded"
        member.holder, member.failed_attempt = "", attempt
        member.given_back += outside
        member.failures += not outside
        self.count("given_back" if outside else "failed")
        if member.failures >= self.rules.max_attempts or member.given_back >= MAX_OUTSIDE:
            self._give_up(number, member)
        return "ok"

    def _give_up(self, number: int, member: Member) -> None:
        if self.rules.on_failure == "zero":
            member.given_up, member.score = True, 0.0
            self.count("zeroed")
            self._filled(number)
        else:
            del self.groups[number]
            self.count("discarded_failed")
            self._advance()

    def _filled(self, number: int) -> None:
        group = self.groups[number]
        scores = [member.score for member in group.members]
        if group.complete and self.rules.filter_uniform and len(set(scores)) == 1:
            del self.groups[number]
            self.count("discarded_uniform")
        self._advance()

    def _advance(self) -> None:
        for number in self.live():
            group = self.groups[number]
            if group.where != "open":
                continue
            if not group.complete:
                return
            group.where = "ready"
            self.stream.append(number)

    # Learner

    def open(self, resume: int) -> list[int]:
        rolled_back = sorted(
            (n for n, g in self.groups.items() if g.where == "trained" and g.update > resume),
            key=lambda n: (self.groups[n].update, str(n)),
        )
        for number in rolled_back:
            self.groups[number].where, self.groups[number].update = "leased", 0
        self.count("rolled_back", len(rolled_back))
        self.epoch += 1
        self.update, self.cursor = resume, 0
        return rolled_back

    def lease(self, count: int) -> list[tuple[int, int]]:
        out = self.stream[self.cursor : self.cursor + count]
        self.cursor += len(out)
        for number in out:
            if self.groups[number].where == "ready":
                self.groups[number].where = "leased"
        return [(number, self.groups[number].update) for number in out]

    def trained(self, update: int, numbers: list[int]) -> None:
        for number in numbers:
            self.groups[number].where, self.groups[number].update = "trained", update
        self.update = update

    def ack(self, update: int) -> list[int]:
        numbers = sorted(n for n, g in self.groups.items() if g.where == "trained" and g.update <= update)
        for number in numbers:
            self._leave_stream(number)
            del self.groups[number]
        return numbers

    def discard(self, number: int) -> None:
        self._leave_stream(number)
        del self.groups[number]
        self.count("discarded_batch")

    def nack(self, number: int) -> None:
        self._leave_stream(number)
        self.groups[number].where = "dead"
        self.count("dead")

    def replay(self, number: int) -> None:
        self.groups[number].where = "open"
        self._advance()

    def _leave_stream(self, number: int) -> None:
        place = self.stream.index(number)
        del self.stream[place]
        if place < self.cursor:
            self.cursor -= 1
