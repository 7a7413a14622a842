"""Trajectories that the learner reads where they lie, in the arena of a store replica on its node, without a copy."""

import weakref
from collections import deque
from contextlib import suppress

import structlog
from dvla.v1 import common_pb2, store_pb2

from services.common import codec
from services.common.arena import Extent, Lease
from services.common.errors import InvalidInput, NotFound
from services.common.locality import Vicinity
from services.common.trajectory import Trajectory

log = structlog.get_logger()


class ExtentReader:
    """Opens extents; each stays locked, so that nobody reuses its room, until the last view of it is gone."""

    def __init__(self, vicinity: Vicinity | None) -> None:
        self._vicinity = vicinity if vicinity is not None and vicinity.peer is not None else None
        # A view may end inside of any call, also one that holds the arena's lock: leases are closed later, by us.
        self._done: deque[Lease] = deque()
        self._told = False

    def locality(self) -> common_pb2.Locality | None:
        """Where this learner runs, for the store; None if it shares no memory."""
        return self._vicinity.locality(common_pb2.TRANSPORT_CUDA_IPC) if self._vicinity else None

    def read(self, claim: store_pb2.Claim, extent: common_pb2.Extent) -> Trajectory | None:
        """Views of a claim's tensors in shared memory; None if the extent cannot be opened from here.

        Raises InvalidInput if the bytes do not match the hash that their producer took.
        """
        if self._vicinity is None or self._vicinity.peer is None:
            return None
        if extent.length != claim.payload.length:
            raise InvalidInput(f"an extent of {extent.length} bytes came for a claim of {claim.payload.length}")
        try:
            lease = self._vicinity.peer.read(Extent.of(extent))
        except NotFound as error:
            if not self._told:
                log.warning("extents cannot be opened; trajectories come by grpc", reason=str(error))
            self._told = True
            return None
        view = lease.view[:]  # an object of its own, whose end is the end of all tensors
        weakref.finalize(view, self._done.append, lease).atexit = False
        try:
            return codec.decode(claim.payload, view.data)
        finally:
            del view

    def let_go(self) -> None:
        """Unlock the extents whose views are gone."""
        with suppress(IndexError):  # several threads may come by
            while True:
                self._done.popleft().close()
