"""Names in Redis. Control keys of a run share one hash tag; blobs of bytes spread over a cluster.

The scripts derive the other control keys of a run from `meta_key` (lua/lib.lua lists them).
"""

import re
from uuid import uuid4

from services.common.arena import Extent
from services.common.errors import InvalidInput

CHUNK_BYTES = 1024 * 1024
STORE_KEY = "dvla:store"
"""A random name for this Redis and its data: arenas carry it, so that no other store adopts them."""
RUNS_KEY = "dvla:runs"
"""Set of the names of the runs that replicas sweep: all that were opened, until there is nothing left to do."""
WAKE_PATTERN = "dvla:{*}:wake"
"""Channels on which scripts say what changed in which run."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_WORKER = re.compile(r"[A-Za-z0-9._:/@-]{1,128}")
_BLOB = re.compile(r"[0-9a-f]{32}-([1-9][0-9]{0,5})")
_EXTENT = re.compile(r"@([A-Za-z0-9._-]{1,128}):([0-9]{1,19}):([0-9]{1,19}):([0-9]{1,20})")
_CURSOR = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


def meta_key(run: str) -> str:
    """Key of a run's record, and with it the hash tag of all its control keys."""
    return f"dvla:{{{run}}}:meta"


def pending_key(run: str) -> str:
    """Sorted set of the blobs that are being written and belong to no claim yet."""
    return f"dvla:{{{run}}}:pending"


def garbage_key(run: str) -> str:
    """Set of the blobs that nobody needs any more."""
    return f"dvla:{{{run}}}:garbage"


def run_of_channel(channel: str) -> str:
    """The run of a wake-up channel."""
    return channel[channel.index("{") + 1 : channel.rindex("}")]


def new_blob(length: int) -> str:
    """A new blob name. It says how many chunks there are, so that the name alone is enough to delete them."""
    return f"{uuid4().hex}-{max(1, -(-length // CHUNK_BYTES))}"


def chunk_keys(blob: str) -> list[str]:
    """Keys of a blob's chunks in order; raises InvalidInput if this is no blob name."""
    match = _BLOB.fullmatch(blob)
    if not match:
        raise InvalidInput(f"{blob[:80]!r} names no stored bytes; pass claims on as they were leased")
    return [f"dvla:blob:{blob}:{index}" for index in range(int(match.group(1)))]


def extent_name(extent: Extent) -> str:
    """The name of bytes in an arena, where a blob's name stands otherwise. The scripts read the arena's name in it."""
    return f"@{extent.arena}:{extent.offset}:{extent.length}:{extent.generation}"


def extent_of(blob: str) -> Extent | None:
    """The extent of such a name; None for any other name."""
    match = _EXTENT.fullmatch(blob)
    return Extent(match[1], int(match[2]), int(match[3]), int(match[4])) if match else None


def held_key(run: str, arena: str) -> str:
    """Set of the names of an arena's extents that a run's claims need."""
    return f"dvla:{{{run}}}:held:{arena}"


def owners_key(run: str) -> str:
    """Set of the arenas in which a run has bytes."""
    return f"dvla:{{{run}}}:owners"


def address_key(arena: str) -> str:
    """Address of the replica that owns an arena; expires unless it is renewed."""
    return f"dvla:arena:{{{arena}}}:address"


def tenants_key(arena: str) -> str:
    """Set of the runs that have had bytes in an arena."""
    return f"dvla:arena:{{{arena}}}:runs"


def check_name(kind: str, name: str) -> str:
    """The name of a run or an evaluation, if it is one; raises InvalidInput otherwise."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{kind} {name[:80]!r}; expected 1 to 64 letters, digits, '.', '_' or '-'")
    return name


def check_worker(name: str) -> str:
    """The name of a worker, if it is one; raises InvalidInput otherwise."""
    if not _WORKER.fullmatch(name):
        raise InvalidInput(f"worker {name[:80]!r}; expected 1 to 128 letters, digits or any of . _ - : / @")
    return name


def check_stream_id(kind: str, value: str) -> str:
    """A stream id such as "1700000000000-0"; raises InvalidInput otherwise."""
    if not _CURSOR.fullmatch(value):
        raise InvalidInput(f"{kind} {value[:80]!r}; expected a stream id such as '1700000000000-0'")
    return value
