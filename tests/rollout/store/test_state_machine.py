"""Random histories of workers, learner, time and restarts against a real server, compared with the model.

After each history the run is driven to its end: every admitted group was trained exactly once, or discarded or
refused for a counted reason; its bytes are those of the attempt that was accepted.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any, TypeVar

import pytest
from dvla.v1 import store_pb2 as s
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from services.common.errors import Superseded
from services.common.redis_server import RedisServer
from tests.rollout.store.harness import GRANT_SECONDS, Clock, Harness, make_spec, name, new_store
from tests.rollout.store.model import Model, Rules

T = TypeVar("T")
WORKERS = ("w0", "w1", "w2")
COUNTERS = (
    *("admitted", "accepted", "repeated", "superseded", "failed", "zeroed", "dead", "rolled_back"),
    *("given_back", "discarded_uniform", "discarded_failed", "discarded_batch"),
)
# What happens, and how often. One rule draws from this list by a seed: hypothesis alone would switch most rules off
# in most histories and prefer short ones, and then nothing is ever trained.
DEEDS = (
    *["collect"] * 5,
    *["learn"] * 4,
    *["finish_all"] * 2,
    *["next_jobs", "next_jobs_twice", "renew", "append", "fail"],
    *["time_passes", "lease", "save", "save", "nack", "replay", "learner_restarts", "store_restarts"],
)


class StoreHistory(RuleBasedStateMachine):
    """One run. `held`: untrained groups in the learner's hands, in lease order. `history`: update -> its groups."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = Clock()
        self.jobs: list[tuple[s.Job, int]] = []  # every job ever granted, and the update of its weights
        self.bytes: dict[tuple[int, int], bytes] = {}  # of the accepted attempt
        self.held: list[int] = []
        self.history: dict[int, list[int]] = {}
        self.checkpoint = 0
        self.in_order = True  # until a rollback or a replay puts older groups behind newer ones

    def do(self, action: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(action)

    @initialize(
        group_size=st.sampled_from([2, 3, 1]),
        groups_per_update=st.sampled_from([2, 3, 1]),
        staleness=st.sampled_from([1, 0, 2]),
        total_updates=st.sampled_from([25, 8]),
        filter_uniform=st.booleans(),
        max_attempts=st.sampled_from([1, 2]),
        on_failure=st.sampled_from(["zero", "discard"]),
    )
    def start(self, group_size: int, filter_uniform: bool, **fields: Any) -> None:
        fields |= {"group_size": group_size, "filter_uniform": filter_uniform and group_size > 1}
        self.spec = make_spec(episode_bytes=256, **fields)
        self.model = Model(Rules(**fields, grant_ms=int(GRANT_SECONDS * 1000)))
        self.connect()
        self.do(self.run.open())
        self.model.open(0)

    def connect(self) -> None:
        self.store = new_store(self.url, self.clock)
        self._run = Harness(self.store, self.clock, self.spec)
        self._run.epoch = self.model.epoch

    @property
    def run(self) -> Harness:
        return self._run

    @rule(seed=st.integers(0, 2**32 - 1), length=st.integers(10, 40))
    def happens(self, seed: int, length: int) -> None:
        chance = Random(seed)
        for _ in range(length):
            deed = chance.choice(DEEDS)
            note(deed)
            getattr(self, deed)(chance)

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        trained = [number for groups in self.history.values() for number in groups]
        assert len(set(trained)) == len(trained)

    # Workers

    def collect(self, chance: Random) -> None:
        """The usual case: take jobs and finish all but a few of them."""
        worker = chance.choice(WORKERS)
        self.take(worker, chance.randint(3, 12), 0)
        self.finish(worker, chance.randint(0, 2), chance)

    def next_jobs(self, chance: Random) -> None:
        self.take(chance.choice(WORKERS), chance.randint(1, 6), chance.randint(0, 3))

    def take(self, worker: str, count: int, behind: int) -> None:
        weights = max(0, self.model.update - behind)
        reply = self.do(self.run.next_jobs(count, weights, worker))
        wanted, reason = self.model.next_jobs(worker, weights, count)
        assert [name(job) for job in reply.jobs] == wanted
        if not wanted:
            assert reply.idle_reason == reason
        assert (reply.index, reply.live_workers) == (list(self.model.workers).index(worker), len(self.model.workers))
        self.jobs += [(job, weights) for job in reply.jobs]

    def next_jobs_twice(self, chance: Random) -> None:
        """The reply is lost and the worker asks again."""
        worker, count = chance.choice(WORKERS), chance.randint(1, 3)
        call_id = f"call-{len(self.jobs)}-{self.clock.skew_ms}"
        first = self.do(self.run.next_jobs(count, self.model.update, worker, call_id))
        wanted, _ = self.model.next_jobs(worker, self.model.update, count)
        assert [name(job) for job in first.jobs] == wanted
        if wanted:
            again = self.do(self.run.next_jobs(count, self.model.update, worker, call_id))
            assert sorted(name(job) for job in again.jobs) == wanted
            self.jobs += [(job, self.model.update) for job in again.jobs]

    def renew(self, chance: Random) -> None:
        worker = chance.choice(WORKERS)
        self.model.expire()
        self.model.seen(worker)
        assert self.do(self.run.renew(worker)) == self.grants(worker)

    def grants(self, worker: str) -> int:
        return sum(member.holder == worker for group in self.model.groups.values() for member in group.members)

    def some_job(self, chance: Random) -> tuple[s.Job, int]:
        """One that is being worked on, or any granted lately: accepted, expired, failed or superseded."""
        return chance.choice(self.current() if chance.random() < 0.6 and self.current() else self.jobs[-12:])

    def current(self, worker: str = "") -> list[tuple[s.Job, int]]:
        """Jobs that a worker holds."""
        out = []
        for job, weights in self.jobs:
            group = self.model.groups.get(job.key.group)
            member = group.members[job.key.member] if group else None
            held = member and member.holder and member.attempt == job.key.attempt
            if member and held and worker in ("", member.holder):
                out.append((job, weights))
        return out

    def append(self, chance: Random) -> None:
        if self.jobs:
            job, weights = self.some_job(chance)
            self.append_one(job, weights, chance.choice([0.0, 1.0, 0.3, 0.1 + 0.2]))

    def append_one(self, job: s.Job, weights: int, score: float) -> None:
        wanted = self.model.append(name(job), score, weights)
        try:
            status = "repeated" if self.do(self.run.append(job, score, weights)).repeated else "accepted"
        except Superseded:
            status = "superseded"
        assert status == wanted
        if status == "accepted":
            place = (job.key.group, job.key.member)
            assert place not in self.bytes
            self.bytes[place] = repr(name(job)).encode()

    def fail(self, chance: Random) -> None:
        if not self.jobs:
            return
        job, weights = self.some_job(chance)
        outside = chance.random() < 0.5
        wanted = self.model.fail(name(job), outside)
        try:
            self.do(self.run.give_back(job) if outside else self.run.fail(job))
            status = "ok"
        except Superseded:
            status = "superseded"
        assert status == wanted
        if chance.random() < 0.5:
            self.append_one(job, weights, 1.0)

    def finish_all(self, chance: Random) -> None:
        for worker in WORKERS:
            self.finish(worker, 0, chance)

    def finish(self, worker: str, keep: int, chance: Random | None = None) -> None:
        """A worker finishes what it holds, in any order, all but `keep` jobs."""
        mine = self.current(worker)
        if chance:
            chance.shuffle(mine)
        for job, weights in mine[keep:]:
            if (job, weights) in self.current(worker):  # else its group went with another member
                alike = job.key.group % 5 == 0
                self.append_one(job, weights, 1.0 if alike else float(job.key.member % 2))

    def time_passes(self, chance: Random) -> None:
        seconds = chance.choice([400, 1200])
        self.clock.forward(seconds)
        self.model.now += seconds * 1000

    # Learner

    @property
    def finished(self) -> bool:
        return self.model.update >= self.model.rules.total_updates

    def learn(self, chance: Random) -> None:
        """The usual case: lease, and train while there is enough."""
        self.lease(chance)
        while len(self.held) >= self.model.rules.groups_per_update and not self.finished:
            self.train(twice=chance.random() < 0.5)

    def lease(self, chance: Random) -> None:
        self.lease_some(chance.randint(1, 8))

    def lease_some(self, count: int) -> None:
        groups = self.do(self.run.lease(count))
        assert [(group.group, group.trained_update) for group in groups] == self.model.lease(count)
        for group in groups:
            assert [claim.key.member for claim in group.claims] == list(range(self.spec.group_size))
            if not group.trained_update:
                assert group.group not in self.held
                self.held.append(group.group)

    def train(self, twice: bool) -> None:
        size = self.model.rules.groups_per_update
        batch, self.held = self.held[:size], self.held[size:]
        if self.in_order:
            assert max(map(self.staleness, batch)) <= self.model.rules.staleness
        for _ in range(1 + twice):
            self.do(self.run.trained(self.model.update + 1, batch))
        self.model.trained(self.model.update + 1, batch)
        self.history[self.model.update] = batch

    def staleness(self, number: int) -> int:
        weights = [member.oldest for member in self.model.groups[number].members if not member.given_up]
        return self.model.update - min(weights, default=self.model.update)

    def save(self, chance: Random) -> None:
        self.checkpoint = self.model.update
        if chance.random() < 0.5:
            acked = self.model.ack(self.checkpoint)
            assert sorted(self.do(self.run.ack(self.checkpoint))) == acked
            if acked:
                self.model.expire()  # an ack sweeps

    def nack(self, chance: Random) -> None:
        if self.held:
            number = chance.choice(self.held)
            self.held.remove(number)
            if chance.random() < 0.3:
                self.do(self.run.nack(number, discard=True))
                self.model.discard(number)
                return
            self.do(self.run.nack(number))
            self.do(self.run.nack(number))
            self.model.nack(number)

    def replay(self, _: Random) -> None:
        letters = self.do(self.run.letters())
        dead = [number for number, group in self.model.groups.items() if group.where == "dead"]
        assert sorted(letter.group for letter in letters) == sorted(dead)
        if letters:
            assert self.do(self.run.replay(letters[0].id)) == letters[0].group
            self.model.replay(letters[0].group)
            self.in_order = False

    def learner_restarts(self, _: Random | None = None) -> None:
        """From its last checkpoint; what it did since never happened."""
        before = self.run.epoch
        reply = self.do(self.run.open(floor=before, resume=self.checkpoint))
        self.in_order = self.in_order and self.checkpoint == self.model.update
        rolled_back = self.model.open(self.checkpoint)
        assert (reply.epoch, reply.update, list(reply.lost)) == (before + 1, self.checkpoint, [])
        assert sorted(reply.rolled_back) == sorted(rolled_back)
        self.held = []
        self.history = {update: groups for update, groups in self.history.items() if update <= self.checkpoint}
        with pytest.raises(Superseded):
            self.do(self.run.lease(epoch=before))

    def store_restarts(self, chance: Random) -> None:
        if chance.random() < 0.5:
            self.do(self.forget_scripts())
        self.do(self.store.close())
        self.connect()

    async def forget_scripts(self) -> None:
        await self.store.link.client.script_flush()

    # The end

    def teardown(self) -> None:
        if hasattr(self, "model"):
            try:
                self.drive_to_the_end()
            finally:
                self.disconnect()
        self.runner.close()

    def disconnect(self) -> None:
        self.do(self.store.close())

    def drive_to_the_end(self) -> None:
        stats = self.do(self.run.stats())
        assert {c: stats.counters[c] for c in COUNTERS} == {c: self.model.counters.get(c, 0) for c in COUNTERS}
        self.clock.forward(1200)
        self.model.now += 1200_000
        self.learner_restarts()
        rules = self.model.rules
        while not self.finished:
            self.take("w0", 12, 0)
            self.finish("w0", 0)
            self.lease_some(100)
            self.check_bytes(self.held)
            while len(self.held) >= rules.groups_per_update and not self.finished:
                self.train(twice=False)
        stats = self.do(self.run.stats())
        assert stats.counters["trained"] == rules.total_updates * rules.groups_per_update
        assert stats.counters["lost"] == 0
        gone = sum(stats.counters[c] for c in ("discarded_uniform", "discarded_failed", "discarded_batch"))
        dead = sum(group.where == "dead" for group in self.model.groups.values())
        assert stats.counters["admitted"] == stats.counters["trained"] + gone + dead + len(self.model.live())

    def check_bytes(self, numbers: Sequence[int]) -> None:
        """What the learner reads is what was accepted."""
        groups = [group for group in self.do(self.run.lease_again()) if group.group in numbers]
        assert [group.group for group in groups] == list(numbers)
        claims = [claim for group in groups for claim in group.claims if claim.HasField("payload")]
        assert self.do(self.run.fetch(claims)) == [self.bytes[claim.key.group, claim.key.member] for claim in claims]


@pytest.mark.redis
@pytest.mark.every_server
def test_random_histories_lose_and_double_nothing(redis_server: RedisServer) -> None:
    class Here(StoreHistory):
        url = redis_server.url

    run_histories(Here, 20)


def run_histories(machine: type[StoreHistory], examples: int) -> None:
    """No shrinking: it takes minutes and a shorter history says no more than the printed seeds and deeds."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    slow = [HealthCheck.too_slow]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=5, deadline=None, suppress_health_check=slow, phases=phases
        ),
    )
