"""The conformance kit: does a simulator service keep the contract? Asks a running one, over gRPC, like a worker would.

Used by `dvla sim check ADDRESS`. Needs one free session; takes a few seconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from dvla.v1 import sim_pb2

from services.common.errors import DvlaError, InvalidInput, NotFound
from services.common.locality import name_of
from services.common.security import Security
from services.common.spec import Array, FloatArray, SimSpec, TaskSpec
from services.sim.client import SimClient, SimSession, reset_slot, zeros

CHUNK = 5
TOLERANCE = 1e-3  # a physics engine may number contacts by its history; anything larger is another episode


@dataclass(frozen=True)
class Finding:
    """The result of one check. detail: what was seen and what the contract says."""

    name: str
    ok: bool
    detail: str


class Violation(Exception):
    """The contract is broken; the text says how."""


def run_checks(address: str, security: Security | None = None, shared_folder: str = "") -> Iterator[Finding]:
    """Run every check, in order; a violation or an error of one does not stop the others."""
    client, sharing = SimClient(address, security), SimClient(address, security, "auto", shared_folder)
    try:
        spec, described = client.describe()
        for name, check in CHECKS.items():
            try:
                yield Finding(name, True, check(_Probe(client, sharing, spec, described.slots_per_session)))
            except (Violation, DvlaError) as error:
                yield Finding(name, False, str(error))
    finally:
        client.close()
        sharing.close()


class _Probe:
    """What the checks share: sessions and episodes of the first task."""

    def __init__(self, client: SimClient, sharing: SimClient, spec: SimSpec, slots: int) -> None:
        self.client, self.sharing, self.spec, self.slots = client, sharing, spec, slots
        self.task: TaskSpec = spec.tasks[0]
        self._rng = np.random.default_rng(0)

    def reset(self, slot: int, seed: int = 1, end_on_success: bool = False) -> sim_pb2.ResetSlot:
        """A reset of one slot, by state or by seed."""
        state = self.client.make_start(self.task.id, seed) if self.spec.starts == "state" else b""
        return reset_slot(slot, self.task.id, state, seed, end_on_success)

    def actions(self, rows: int = 1, chunk: int = CHUNK) -> FloatArray:
        """Random actions within the limits, the same in every row."""
        action = self.spec.action
        low, high = np.clip(action.low, -1, 1), np.clip(action.high, -1, 1)
        one = self._rng.uniform(low, high, (1, chunk, action.dim)).astype(np.float32)
        return np.repeat(one, rows, axis=0)

    def refused(self, kind: type[DvlaError], what: str, turn: Callable[[SimSession], object]) -> None:
        """The turn must be refused with this error."""
        with self.client.open() as session:
            session.advance([self.reset(0)])
            try:
                turn(session)
            except kind:
                return
            except DvlaError as error:
                raise Violation(f"{what} got {type(error).__name__} ({error}), expected {kind.__name__}") from error
        raise Violation(f"{what} was accepted, expected {kind.__name__}")


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)


def _close(one: dict[str, Array], other: dict[str, Array], row: int, other_row: int, text: str) -> None:
    for name in one:
        if name.startswith("obs/"):
            gap = np.abs(one[name][row].astype(np.float64) - other[name][other_row].astype(np.float64)).max(initial=0)
            limit = 32 if one[name].dtype == np.uint8 else TOLERANCE
            _expect(gap <= limit, f"{text}: {name} differs by {gap:.3g}")


def check_spec(probe: _Probe) -> str:
    """The spec is complete."""
    spec, action = probe.spec, probe.spec.action
    _expect(bool(spec.observation), "the spec lists no observation tensor")
    for tensor in spec.observation:
        image = tensor.name.startswith("rgb/")
        _expect(image or tensor.name == "state", f"tensor {tensor.name!r}: expected state or rgb/<camera>")
        _expect(not image or (tensor.dtype == "uint8" and len(tensor.shape) == 3), f"{tensor.name}: expected uint8 HWC")
    _expect(action.dim > 0 and len(action.low) == len(action.high) == action.dim, "action limits do not match its size")
    finite = bool(np.isfinite([*action.low, *action.high]).all())
    _expect(action.bounded == finite, f"bounded = {action.bounded}, but the limits are {action.low} to {action.high}")
    for task in spec.tasks:
        _expect(task.max_steps > 0 and bool(task.instruction), f"task {task.id!r} lacks an instruction or a step limit")
    return f"{spec.backend}, {len(spec.tasks)} tasks, {probe.slots} slots per session, starts = {spec.starts}"


def check_shapes(probe: _Probe) -> str:
    """Tensors come as the spec says."""
    rows = min(probe.slots, 3)
    with probe.client.open() as session:
        _, first = session.advance([probe.reset(slot) for slot in range(rows)])
        reply, then = session.advance(slots=range(rows), actions=probe.actions(rows))
    for arrays in (first, then):
        for tensor in probe.spec.observation:
            array = arrays.get(f"obs/{tensor.name}")
            _expect(array is not None, f"observation {tensor.name!r} is missing")
            assert array is not None
            got = (array.dtype.name, array.shape[1:])
            _expect(got == (tensor.dtype, tensor.shape), f"{tensor.name} is {got}, the spec says {tensor}")
    _expect(len(reply.outcomes) == rows, f"{len(reply.outcomes)} outcomes for {rows} advanced slots")
    for name, dtype in (("reward", "float32"), ("success", "bool")):
        got = then[name].dtype.name, then[name].shape
        _expect(got == (dtype, (rows, CHUNK)), f"{name} is {got}, expected {dtype} [{rows}, {CHUNK}]")
    return f"{len(probe.spec.observation)} observation tensors, reward, success"


def check_starts(probe: _Probe) -> str:
    """One start is the same in every slot and every subset; another seed is another start."""
    if probe.spec.starts == "none":
        return "this simulator offers no replayable starts; algorithms with groups are excluded"
    if probe.spec.starts == "state":
        make = probe.client.make_start
        _expect(
            make(probe.task.id, 1) == make(probe.task.id, 1), "MakeStart gave other bytes for the same task and seed"
        )
        _expect(make(probe.task.id, 1) != make(probe.task.id, 2), "MakeStart gave the same bytes for two seeds")
    last = probe.slots - 1
    with probe.client.open() as session:
        _, alone = session.advance([probe.reset(last)])
        _, every = session.advance([probe.reset(slot) for slot in range(probe.slots)])
    for slot in range(probe.slots):
        _close(alone, every, 0, slot, f"the same start differs between slot {last} alone and slot {slot} of all")
    return f"equal in {probe.slots} slots and in subsets"


def check_determinism(probe: _Probe) -> str:
    """Equal actions from an equal start give equal steps."""
    if probe.spec.starts == "none":
        return "skipped: no replayable starts"
    actions = probe.actions()
    with probe.client.open() as session:
        session.advance([probe.reset(0)])
        _, one = session.advance(slots=[0], actions=actions)
        session.advance([probe.reset(0)])
        _, two = session.advance(slots=[0], actions=actions)
    gap = float(np.abs(one["reward"].astype(np.float64) - two["reward"].astype(np.float64)).max())
    _expect(gap <= TOLERANCE, f"rewards of a replay differ by {gap:.3g}")
    _close(one, two, 0, 0, "a replay of the same actions")
    return f"{CHUNK} steps replayed"


def check_isolation(probe: _Probe) -> str:
    """A neighbour's reset and steps do not touch a slot."""
    if probe.slots < 2 or probe.spec.starts == "none":
        return "skipped: it takes two slots and replayable starts"
    actions, other = probe.actions(), probe.actions()
    with probe.client.open() as session:
        session.advance([probe.reset(0), probe.reset(1)])
        session.advance(slots=[0], actions=actions)
        _, alone = session.advance(slots=[0], actions=actions)
        session.advance([probe.reset(0), probe.reset(1)])
        session.advance(slots=[0], actions=actions)
        session.advance(slots=[1], actions=other)
        session.advance([probe.reset(1, seed=2)])
        reply, disturbed = session.advance(slots=[0], actions=actions)
    step = reply.outcomes[0].step
    _expect(step == 2 * CHUNK, f"slot 0 counts {step} steps after its neighbour's reset, expected {2 * CHUNK}")
    _close(alone, disturbed, 0, 0, "slot 0 with and without a busy neighbour")
    return "slot 0 is the same with and without a busy neighbour"


def check_ends(probe: _Probe) -> str:
    """An episode that does not end on success runs to the step limit, and its last observation comes with it."""
    limit = probe.task.max_steps
    with probe.client.open(final_observation=sim_pb2.FINAL_OBSERVATION_ALL) as session:
        session.advance([probe.reset(0)])
        reply, arrays = _to_the_end(session, probe)
        outcome = reply.outcomes[0]
        _expect(not outcome.failure, f"the episode failed: {outcome.failure}")
        _expect(outcome.terminated or outcome.truncated, f"no end after {outcome.step} steps; the limit is {limit}")
        _expect(not outcome.truncated or outcome.step == limit, f"truncated at step {outcome.step}, not at {limit}")
        _expect(list(reply.observed) == [0], "the final observation is missing")
        _expect(not arrays["reward"][0, outcome.executed :].any(), "rewards after the end are not 0")
        try:
            session.advance(slots=[0], actions=zeros(probe.spec, 1, CHUNK))
        except InvalidInput:
            return f"{'truncated' if outcome.truncated else 'terminated'} at step {outcome.step} of {limit}"
    raise Violation("a slot whose episode has ended was stepped on without a reset")


def _to_the_end(session: SimSession, probe: _Probe) -> tuple[sim_pb2.Advanced, dict[str, Array]]:
    """Do nothing until the episode ends or the step limit is long over; the last reply."""
    while True:
        reply, arrays = session.advance(slots=[0], actions=zeros(probe.spec, 1, CHUNK))
        last = reply.outcomes[0]
        if last.terminated or last.truncated or last.failure or last.step > probe.task.max_steps:
            return reply, arrays


def check_clipping(probe: _Probe) -> str:
    """Actions beyond the limits are clipped, and the executed ones are reported."""
    action = probe.spec.action
    if not action.bounded:
        return "skipped: this controller has no limits"
    wild = np.tile(10 * np.abs(np.array(action.high, np.float32)) + 1, (1, 1, 1)).astype(np.float32)
    with probe.client.open() as session:
        session.advance([probe.reset(0)])
        _, arrays = session.advance(slots=[0], actions=wild)
    executed = arrays["executed_action"][0, 0]
    _expect(np.allclose(executed, action.high), f"executed {executed.tolist()}, expected the limits {action.high}")
    return f"clipped to {list(action.high)}"


def check_bad_input(probe: _Probe) -> str:
    """Bad input is refused by name, and the simulator goes on."""
    dim = probe.spec.action.dim
    nan = np.full((1, 1, dim), np.nan, np.float32)
    refused = probe.refused
    refused(NotFound, "an unknown task", lambda s: s.advance([reset_slot(0, "no such task", b"x")]))
    refused(InvalidInput, "an action that is not finite", lambda s: s.advance(slots=[0], actions=nan))
    refused(
        InvalidInput,
        "an action of a wrong size",
        lambda s: s.advance(slots=[0], actions=np.zeros((1, 1, dim + 1), np.float32)),
    )
    refused(InvalidInput, "a float64 action", lambda s: s.advance(slots=[0], actions=np.zeros((1, 1, dim))))  # type: ignore[arg-type]
    refused(
        InvalidInput,
        "a slot that does not exist",
        lambda s: s.advance(slots=[probe.slots], actions=zeros(probe.spec, 1)),
    )
    refused(InvalidInput, "a slot twice", lambda s: s.advance(slots=[0, 0], actions=zeros(probe.spec, 2)))
    if probe.spec.starts == "state":
        refused(InvalidInput, "a reset without a state", lambda s: s.advance([reset_slot(0, probe.task.id)]))
    with probe.client.open() as session:
        session.advance([probe.reset(0)])
        session.advance(slots=[0], actions=zeros(probe.spec, 1))
    return "refused by name, and the next session works"


def check_transport(probe: _Probe) -> str:
    """Shared memory, where the service offers it to us, holds what grpc brings."""
    with probe.sharing.open() as session:
        name, reason = name_of(session.opened.transport), session.opened.reason
        _, shared = session.advance([probe.reset(0)])
    if name == "grpc":
        return f"grpc only: {reason}"
    if probe.spec.starts == "none":
        return f"{name}, not compared: no replayable starts"
    with probe.client.open() as session:
        _, sent = session.advance([probe.reset(0)])
    _close(shared, sent, 0, 0, f"the same start by {name} and by grpc")
    return f"{name} equals grpc"


CHECKS: dict[str, Callable[[_Probe], str]] = {
    "spec": check_spec,
    "shapes": check_shapes,
    "starts": check_starts,
    "determinism": check_determinism,
    "isolation": check_isolation,
    "ends": check_ends,
    "clipping": check_clipping,
    "bad input": check_bad_input,
    "transport": check_transport,
}
