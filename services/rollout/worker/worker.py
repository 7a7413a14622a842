"""The rollout worker: keeps sampling loops on its share of the simulators and connects them to store and policy."""

import asyncio
import itertools
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from dvla.v1 import store_pb2

from services.common.errors import DvlaError, Exhausted, NotFound, Unavailable, Unsupported
from services.common.locality import Vicinity
from services.common.spec import SimSpec
from services.common.telemetry import BUSY, Telemetry
from services.rollout.worker.addresses import resolve, share
from services.rollout.worker.client_sim import Session, SimClient
from services.rollout.worker.client_store import StoreClient, version_of
from services.rollout.worker.config import RolloutConfig
from services.rollout.worker.delivery import Deliveries
from services.rollout.worker.episode import Episode
from services.rollout.worker.policy_runner import Chunk, PolicyRunner, Row
from services.rollout.worker.receiving import Receiver
from services.rollout.worker.sampler import Sampler, finished
from services.rollout.worker.starts import Starts
from services.rollout.worker.turn import Outcome

log = structlog.get_logger()

LOOK_SECONDS = 3.0
"""How often addresses are looked up and sessions spread again."""
JOB_WAIT_SECONDS = 1.0
GIVE_BACK_SECONDS = 5.0
"""Time for handing in or giving back what is in flight when a session or the worker ends."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 2.0
"""Between sessions on a simulator that is away, full or misbehaves: doubled each time, unless a session lasted."""


@dataclass
class Asking:
    """One session's request for jobs, the same until it is answered: a session never has fewer free slots then."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    open: bool = False
    """It was sent and not answered: jobs may have been granted that nobody here knows of."""

    def sent(self) -> str:
        """Note that it is on its way; returns its id."""
        self.open = True
        return self.request_id

    def answered(self) -> None:
        """The next one is another request."""
        self.request_id, self.open = uuid.uuid4().hex, False


@dataclass
class Worker:
    """All that one rollout process does. `run` never returns by itself; cancel it to stop."""

    config: RolloutConfig
    telemetry: Telemetry
    store: StoreClient
    policy: PolicyRunner
    receiver: Receiver
    spec: store_pb2.RunSpec
    place: tuple[int, int] = (0, 1)
    """(index, live workers)."""
    idle_reason: str = "work"
    _sessions: dict[int, bool] = field(default_factory=dict)
    """Open sessions: whether an episode is in flight there."""
    _drains: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lane = self.telemetry.lane("sampling")
        self._lane.set("sim")
        self.policy.batch_wait = self.config.batch_wait
        self.starts = Starts(self.store.set_start)
        self._deliveries = Deliveries(self.store, self.telemetry, self.config.pending_appends)
        self._ids = itertools.count()
        self._vicinity = Vicinity(self.config.transport, self.config.shared_folder)

    async def run(self) -> None:
        """Spread sessions over the simulators, again and again; renew grants meanwhile."""
        try:
            await self._run()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            await self._deliveries.flush(GIVE_BACK_SECONDS)
            self._vicinity.close()

    async def _run(self) -> None:
        addresses: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            while True:
                addresses = await resolve(self.config.sims) or addresses  # a name server may be away for a moment
                mine = share(addresses, *self.place)
                wanted = {(address, n) for address in mine for n in range(self.config.sessions_per_sim)}
                for key in self._drains.keys() - wanted:
                    self._drains[key].set()
                for key in sorted(wanted - self._drains.keys()):
                    self._drains[key] = asyncio.Event()
                    tasks.create_task(self._keep_session(key))
                self.telemetry.gauge("sims", len(addresses))
                self.telemetry.gauge("sessions", len(self._sessions))
                await asyncio.sleep(LOOK_SECONDS)

    async def _keep_session(self, key: tuple[str, int]) -> None:
        """Sample on one session; open it again whenever it breaks, until it is surplus."""
        address, drain, pause = key[0], self._drains[key], PAUSE_SECONDS
        while not drain.is_set():
            client, began = SimClient(address, self.config.security(), self._vicinity), time.monotonic()
            try:
                await self._sample(client, drain)
            except Exhausted as error:
                log.debug("simulator is full", address=address, reason=str(error))
            except Unsupported:
                raise  # this simulator cannot serve this run; waiting would not help
            except Unavailable as error:
                log.warning("simulator lost", address=address, reason=str(error))
            except DvlaError as error:
                log.error("session failed", address=address, reason=str(error))
                self.telemetry.count("sessions_failed")
            finally:
                await client.close()
            lasted = time.monotonic() - began > LONGEST_PAUSE_SECONDS
            pause = PAUSE_SECONDS if lasted else min(2 * pause, LONGEST_PAUSE_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await drain.wait()
        del self._drains[key]

    async def _sample(self, client: SimClient, drain: asyncio.Event) -> None:
        spec, _ = await client.describe()
        self._check(spec, client.address)
        session = await client.open(self.store.worker, self.spec.observation, self.spec.final_observation)
        self.telemetry.facts[f"transport/{client.address}"] = session.transport
        log.info("session open", address=client.address, slots=session.slots, transport=session.transport)
        desk = _SessionDesk(self, client, session, spec, next(self._ids))
        sampler = Sampler(session, spec, desk, drain, self.spec.final_observation)
        self.sampling(desk.number, False)
        try:
            await sampler.run()
        except BaseException as error:
            self.telemetry.count("episodes_lost", len(sampler.episodes))
            await self._give_back(sampler, desk.asking, f"session on {client.address} ended: {error!r}")
            raise
        finally:
            del self._sessions[desk.number]
            self._account()
            await session.close()

    async def _give_back(self, sampler: Sampler, asking: Asking, reason: str) -> None:
        jobs = len(sampler.episodes) + len(sampler.jobs)
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                if asking.open:  # asked again, it names the jobs that it granted in a reply that was lost
                    sampler.jobs += await self.take_jobs(1, 0.0, asking)
                await sampler.abandon(reason)
        except (TimeoutError, DvlaError) as error:
            log.warning("jobs not given back; their grants will expire", jobs=jobs, reason=repr(error))

    def _check(self, spec: SimSpec, address: str) -> None:
        """Refuse a simulator that cannot serve this run; the error ends the worker with one clear line."""
        if self.spec.same_start and spec.starts == "none":
            raise Unsupported(
                f"simulator {address} can neither store start states nor make them from seeds, but this run compares "
                "members of groups; use an algorithm without groups or a simulator with starts"
            )
        known = {task.id for task in spec.tasks}
        unknown = [task.task for task in self.spec.tasks if task.task not in known]
        if unknown:
            raise Unsupported(f"simulator {address} does not know task {unknown[0]!r}; it offers {sorted(known)}")
        missing = set(self.spec.observation) - {tensor.name for tensor in spec.observation}
        if missing:
            raise Unsupported(
                f"simulator {address} does not offer {sorted(missing)}, which the policy reads; "
                f"it offers {[tensor.name for tensor in spec.observation]}"
            )

    async def take_jobs(self, count: int, wait_seconds: float, asking: Asking) -> list[store_pb2.Job]:
        """Jobs for free slots; also learns this worker's place and, when idle, why."""
        try:
            reply = await self.store.next_jobs(self.policy.version, count, wait_seconds, asking.sent())
            asking.answered()
        except (Unavailable, NotFound) as error:  # NotFound: Redis lost the run; the learner will open it again
            log.warning("no jobs", reason=str(error))
            self.idle_reason = "store"
            await asyncio.sleep(min(wait_seconds, PAUSE_SECONDS))
            return []
        self.place = (reply.index, max(1, reply.live_workers))
        self.idle_reason = reply.idle_reason or "work"
        if self.idle_reason == "finished":
            await asyncio.sleep(wait_seconds)  # the store answers at once
        return list(reply.jobs)

    async def prepare(self, job: store_pb2.Job) -> None:
        """Have an evaluation's version loaded; raises NotFound if that is impossible."""
        if job.kind != store_pb2.JOB_KIND_EVALUATE:
            return
        try:
            await self.receiver.pin(version_of(job.version))
        except DvlaError as error:
            raise NotFound(f"version not available: {error}") from error

    def sampling(self, session: int, busy: bool) -> None:
        """Note whether a session has an episode in flight."""
        self._sessions[session] = busy
        self._account()

    def _account(self) -> None:
        """The sampling lane is busy while any session is; without a session it waits for simulators."""
        idle = self.idle_reason if self._sessions else "sim"
        self.policy.callers = sum(self._sessions.values())
        self._lane.set(BUSY if any(self._sessions.values()) else idle)

    async def deliver(self, episode: Episode, outcome: Outcome, backend: str) -> None:
        """Count an episode and send it to the store in the background."""
        facts, trajectory = finished(episode, outcome, self.spec.score, backend, self.store.worker)
        self.telemetry.count("episodes")
        self.telemetry.count("env_steps", facts.steps)
        self.telemetry.count("successes", facts.success_once)
        await self._deliveries.add(episode.job, facts, trajectory)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(max(0.5, self.spec.grant_seconds / 3))
            try:
                self.telemetry.gauge("grants", await self.store.renew())
            except DvlaError as error:
                log.warning("grants not renewed", reason=str(error))


@dataclass
class _SessionDesk:
    """The worker as one session's loop sees it."""

    worker: Worker
    client: SimClient
    session: Session
    spec: SimSpec
    number: int
    asking: Asking = field(default_factory=Asking)

    async def take_jobs(self, count: int, busy: bool) -> list[store_pb2.Job]:
        if not busy:
            self.worker.sampling(self.number, False)
        jobs = await self.worker.take_jobs(count, 0.0 if busy else JOB_WAIT_SECONDS, self.asking)
        if jobs or busy:
            self.worker.sampling(self.number, True)
        return jobs

    async def begin(self, job: store_pb2.Job) -> bytes:
        await self.worker.prepare(job)
        if self.spec.starts != "state":
            return b""
        return await self.worker.starts.of(job, self.client.make_start)

    async def act(self, rows: list[Row]) -> list[Chunk]:
        return await self.worker.policy.act(rows)

    async def deliver(self, episode: Episode, outcome: Outcome) -> None:
        await self.worker.deliver(episode, outcome, f"{self.spec.backend} x{self.session.slots}")

    async def fail(self, job: store_pb2.Job, reason: str, outside: bool = False) -> None:
        self.worker.telemetry.count("episodes_given_back" if outside else "episodes_failed")
        await self.worker.store.fail(job, reason, outside)


def _first(error: BaseException) -> BaseException:
    """The first single error of a group, so that it is shown as one line and not as a tree."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
