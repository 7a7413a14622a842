"""Checks of what peers send, before anything is stored. Errors name field, value and expectation."""

import math

from dvla.v1 import common_pb2, store_pb2

from services.common.codec import INLINE_LIMIT
from services.common.errors import InvalidInput, Unsupported
from services.rollout.store.keys import CHUNK_BYTES, check_name
from services.rollout.store.memory import OVERHEAD, REFUSE_SHARE

MAX_JOBS = 1024
MAX_EPISODES = 100_000
MAX_START_BYTES = 256 * 1024
_WHOLE = {
    "group_size": (1, 4096),
    "groups_per_update": (1, 65536),
    "staleness": (0, 4096),
    "total_updates": (1, 2**40),
    "max_attempts": (1, 1000),
}


def check_spec(spec: store_pb2.RunSpec) -> None:
    """Refuse an impossible run."""
    check_name("run", spec.run)
    check_name("model", spec.model)
    for name, (low, high) in _WHOLE.items():
        value = getattr(spec, name)
        if not low <= value <= high:
            raise InvalidInput(f"{name} = {value}; expected {low} to {high}")
    _check_tasks(spec)
    for name, choices in (("on_failure", ("zero", "discard")), ("score", ("success", "sum", "differential"))):
        if getattr(spec, name) not in choices:
            raise InvalidInput(f"{name} = {getattr(spec, name)!r}; expected {' or '.join(map(repr, choices))}")
    if not 0.001 <= spec.grant_seconds <= 86400:
        raise InvalidInput(f"grant_seconds = {spec.grant_seconds}; expected 0.001 to 86400")
    if spec.filter_uniform and spec.group_size < 2:
        raise InvalidInput("filter_uniform needs group_size of 2 or more: a group of one always has one score")


def _check_tasks(spec: store_pb2.RunSpec) -> None:
    names = [share.task for share in spec.tasks]
    if not names or "" in names or len(set(names)) < len(names):
        raise InvalidInput(f"tasks = {names}; expected at least one, with different names")
    for share in spec.tasks:
        if not (math.isfinite(share.weight) and share.weight > 0):
            raise InvalidInput(f"weight of task {share.task!r} = {share.weight}; expected above 0")


def different_fields(wanted: store_pb2.RunSpec, stored: store_pb2.RunSpec) -> str:
    """The fields in which two specs differ, in words."""
    return ", ".join(
        f"{field.name} (stored {getattr(stored, field.name)!s:.80}, given {getattr(wanted, field.name)!s:.80})"
        for field in wanted.DESCRIPTOR.fields
        if getattr(wanted, field.name) != getattr(stored, field.name)
    )


def required_memory(spec: store_pb2.RunSpec) -> int:
    """Redis memory in bytes that s + 2 updates of the largest episodes need below the refusal share."""
    groups = (spec.staleness + 2) * spec.groups_per_update
    return math.ceil(groups * spec.group_size * spec.episode_bytes * OVERHEAD / REFUSE_SHARE)


def check_memory(spec: store_pb2.RunSpec, limit: int) -> None:
    """Refuse a Redis in which the oldest group could starve for room. limit: maxmemory in bytes, 0 for none."""
    needed = required_memory(spec)
    if limit and needed > limit:
        raise Unsupported(
            f"run {spec.run!r} can have {spec.staleness + 2} x {spec.groups_per_update} groups of {spec.group_size} x "
            f"{spec.episode_bytes} bytes in flight: set maxmemory of Redis to {needed} bytes or more (it is {limit})"
        )


def check_episode(episode: store_pb2.Episode) -> None:
    """Refuse facts that are missing or not finite."""
    for name in ("score", "reward_sum"):
        if not math.isfinite(getattr(episode, name)):
            raise InvalidInput(f"episode.{name} = {getattr(episode, name)}; expected a finite number")
    if episode.steps < 1:
        raise InvalidInput("episode.steps = 0; expected the number of executed control steps")
    if not (episode.HasField("oldest") and episode.HasField("newest")):
        raise InvalidInput("episode.oldest and episode.newest are not set; expected the versions of its chunks")
    oldest, newest = version_order(episode.oldest), version_order(episode.newest)
    if oldest > newest:
        raise InvalidInput(f"episode.oldest {oldest} is newer than episode.newest {newest}")


def check_payload(payload: common_pb2.Payload, largest: int) -> None:
    """Refuse a payload that is oversize, inconsistent, or lies where this store cannot read. largest: 0 for any."""
    location = payload.WhichOneof("location")
    if location == "cuda":
        raise Unsupported("bytes in GPU memory end with their worker; write them into the job's extent or send frames")
    if payload.length < 1 or not payload.tensors:
        raise InvalidInput(f"payload of {payload.length} bytes and {len(payload.tensors)} tensors is no episode")
    if largest and payload.length > largest:
        raise InvalidInput(f"payload of {payload.length} bytes; the run's largest episode is {largest} (episode_bytes)")
    if location == "inline" and (len(payload.inline) != payload.length or payload.length > INLINE_LIMIT):
        raise InvalidInput(
            f"payload has {len(payload.inline)} inline bytes and length {payload.length}; expected equal and at most "
            f"{INLINE_LIMIT}, larger ones go as frames"
        )
    if location == "shm" and payload.shm.length != payload.length:
        raise InvalidInput(f"payload of {payload.length} bytes in an extent of {payload.shm.length}; expected equal")
    if location not in ("inline", "shm") and payload.frames < -(-payload.length // CHUNK_BYTES):
        raise InvalidInput(f"payload of {payload.length} bytes in {payload.frames} frames; a frame has at most 1 MiB")
    for tensor in payload.tensors:
        if tensor.offset >= payload.length and 0 not in tensor.shape:
            raise InvalidInput(f"tensor {tensor.name!r} starts at {tensor.offset} of {payload.length} bytes")


def version_order(version: common_pb2.Version) -> tuple[int, int]:
    """A version as a tuple that compares as versions do."""
    return version.epoch, version.update


def version_text(version: common_pb2.Version) -> str:
    """A version as "epoch/update"."""
    return f"{version.epoch}/{version.update}"
