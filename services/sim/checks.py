"""Checks of what comes in from a client and of what a simulator returns: shapes, dtypes, ranges, finite values."""

from collections.abc import Sequence

import numpy as np

from services.common.errors import InvalidInput, Unsupported
from services.common.spec import ActionSpec, BoolArray, FloatArray, IntArray, Observation, SimSpec
from services.sim.vector import ControlStep, Start

MAX_CHUNK = 1024  # control steps; a longer chunk is a mistake and would block the other sessions for seconds


def check_slots(slots: IntArray, num_slots: int) -> IntArray:
    """Slots as int64 [n], n >= 1, without repeats, each below num_slots."""
    slots = np.asarray(slots)
    if slots.ndim != 1 or not np.issubdtype(slots.dtype, np.integer):
        raise InvalidInput(f"slots are {slots.dtype}{list(slots.shape)}, expected a list of integers")
    if not len(slots) or slots.min() < 0 or slots.max() >= num_slots:
        raise InvalidInput(f"slots {slots.tolist()} are out of range, expected some of 0..{num_slots - 1}")
    if len(np.unique(slots)) != len(slots):
        raise InvalidInput(f"slots {slots.tolist()} repeat, expected each slot once")
    return slots.astype(np.int64)


def check_starts(starts: Sequence[Start], n: int, spec: SimSpec) -> None:
    """One start per slot, of a known task, with the bytes that this simulator needs."""
    if len(starts) != n:
        raise InvalidInput(f"{len(starts)} starts for {n} slots, expected one per slot")
    for start in starts:
        spec.task(start.task)
        if spec.starts == "state" and not start.state:
            raise InvalidInput(f"start of task {start.task!r} has no state; make one first (MakeStart)")


def check_flags(flags: BoolArray, n: int) -> BoolArray:
    """One bool per slot."""
    flags = np.asarray(flags)
    if flags.shape != (n,) or flags.dtype != np.bool_:
        raise InvalidInput(f"end_on_success is {flags.dtype}{list(flags.shape)}, expected bool[{n}]")
    return flags


def check_actions(actions: FloatArray, n: int, spec: ActionSpec) -> FloatArray:
    """Actions float32 [n, C, D], clipped to the spec's limits on a copy."""
    given = np.asarray(actions)
    if given.dtype != np.float32:
        raise InvalidInput(f"actions are {given.dtype}, expected float32")
    if given.ndim != 3 or given.shape[0] != n or given.shape[2] != spec.dim or not 1 <= given.shape[1] <= MAX_CHUNK:
        raise InvalidInput(
            f"actions have shape {list(given.shape)}, expected [{n} slots, chunk 1..{MAX_CHUNK}, {spec.dim}]"
        )
    if not np.isfinite(given).all():
        rows = np.flatnonzero(~np.isfinite(given).all(axis=(1, 2))).tolist()
        raise InvalidInput(f"actions of rows {rows} are not finite")
    return np.clip(given, np.array(spec.low, np.float32), np.array(spec.high, np.float32))


def check_control_step(step: ControlStep, n: int) -> ControlStep:
    """What a simulator's `step` returned: float32 and bool [n]."""
    expected: tuple[tuple[str, np.dtype[np.generic]], ...] = (
        ("reward", np.dtype(np.float32)),
        ("success", np.dtype(np.bool_)),
        ("terminated", np.dtype(np.bool_)),
    )
    for name, dtype in expected:
        array = getattr(step, name)
        if not isinstance(array, np.ndarray) or array.shape != (n,) or array.dtype != dtype:
            raise Unsupported(f"the simulator's step returned {name} {_describe(array)}, expected {dtype}[{n}]")
    return step


def check_observation(observation: Observation, n: int, spec: SimSpec) -> Observation:
    """What a simulator's `observe` returned: exactly the tensors of its spec, leading dimension n."""
    names = {tensor.name for tensor in spec.observation}
    if observation.keys() != names:
        raise Unsupported(f"the simulator observed {sorted(observation)}, its spec promises {sorted(names)}")
    for tensor in spec.observation:
        array = observation[tensor.name]
        if array.shape != (n, *tensor.shape) or array.dtype != np.dtype(tensor.dtype):
            expected = f"{tensor.dtype}{[n, *tensor.shape]}"
            raise Unsupported(f"the simulator observed {tensor.name} as {_describe(array)}, expected {expected}")
    return observation


def finite_rows(observation: Observation) -> tuple[BoolArray, list[str]]:
    """Per row: whether all floats are finite, and "" or which tensor is not."""
    n = len(next(iter(observation.values())))
    why = [""] * n
    for name, array in observation.items():
        if np.issubdtype(array.dtype, np.floating):
            for row in np.flatnonzero(~np.isfinite(array).all(axis=tuple(range(1, array.ndim)))):
                why[row] = f"observation {name!r} is not finite"
    return np.array([not text for text in why], np.bool_), why


def _describe(array: object) -> str:
    return f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
