"""Shared-memory arena: one preallocated tmpfs file, extents of it under kernel locks, views without a copy.

The owner (one process, such as a store replica) makes the file and gives room out:

    arena = Arena.create(shared_folder(""), "store", size)   # ConfigError at start if the memory is not there
    extent = arena.allocate(length)                          # reserved; Exhausted if there is no room now
    extent = arena.shrink(extent, used)                      # the unused tail comes back
    arena.seal(extent)                                       # accepted: immutable, readable, never swept
    arena.release(extent)                                    # freed, at once or when its last reader lets go
    arena.sweep(seconds)                                     # frees reserved extents whose writers died

Peers (other processes, also in other containers that mount the same folder) get an extent over the wire:

    peer = Peer(folder)
    with peer.write(Extent.of(message)) as lease:            # exclusive lock: a sign of life until closed
        lease.view[:] = ...                                  # uint8, writable, shared
    with peer.read(extent) as lease:                         # shared lock: the owner frees nothing under it
        codec.decode(payload, memoryview(lease.view))        # numpy views; torch.from_numpy shares them too

After a crash of the owner, `orphans(folder, prefix)` adopts its files with all extents, sealed and reserved;
`arena.extents()` lists them. `needed(count, longest)` is the size that never runs out of room.

What kernel locks give: a writer or reader that dies lets go at once, one that is stopped keeps what it holds, and
process ids (equal to 1 in every container) play no part.
"""

from services.common.arena.owner import Arena, orphans
from services.common.arena.peer import Lease, Peer
from services.common.arena.space import needed
from services.common.arena.table import Extent

__all__ = ["Arena", "Extent", "Lease", "Peer", "needed", "orphans"]
