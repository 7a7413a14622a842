"""Room in the store's arena: granted with each job to a worker that shares memory, written in place, kept locked."""

from collections.abc import Mapping
from dataclasses import replace

import structlog
import xxhash
from dvla.v1 import common_pb2, store_pb2

from services.common import codec
from services.common.arena import Extent, Lease
from services.common.errors import DvlaError
from services.common.locality import Vicinity
from services.common.spec import Array

log = structlog.get_logger()

Key = tuple[str, int, int, int]


class Rooms:
    """The rooms of one worker's jobs. Without shared memory there are none, and episodes go by grpc."""

    def __init__(self, vicinity: Vicinity | None) -> None:
        self._vicinity = vicinity if vicinity is not None and vicinity.peer is not None else None
        self._open: dict[Key, tuple[Extent, Lease]] = {}
        self._told = ""
        self._largest = 0  # bytes of the longest episode so far; one that is longer goes by grpc, once

    def introduce(self, request: store_pb2.NextJobsRequest) -> None:
        """Say in a request for jobs where this worker runs, and how much room its episodes take."""
        if self._vicinity is not None:
            request.locality.CopyFrom(self._vicinity.locality(common_pb2.TRANSPORT_CUDA_IPC))
            request.episode_bytes = self._largest

    def open(self, job: store_pb2.Job) -> None:
        """Lock the room of a job. If it cannot be opened, this job's episode goes by grpc."""
        if self._vicinity is None or self._vicinity.peer is None or job.kind != store_pb2.JOB_KIND_TRAIN:
            return
        extent, key = Extent.of(job.reserved), _key(job)
        if not job.HasField("reserved"):
            return self._tell("episodes go by grpc")
        if key in self._open and self._open[key][0] == extent:
            return None  # the same grant again
        self.close(job)
        try:
            self._open[key] = extent, self._vicinity.peer.write(extent)
        except DvlaError as error:
            return self._tell(f"episodes go by grpc: {error}")
        return self._tell("episodes go through shared memory")

    def write(self, job: store_pb2.Job, trajectory: Mapping[str, Array]) -> common_pb2.Payload | None:
        """Write an episode into its job's room; None if there is none, or if it is too small."""
        extent, lease = self._open.get(_key(job), (None, None))
        layout = codec.plan(trajectory)
        self._largest = max(self._largest, layout.length)
        if extent is None or lease is None or layout.length > extent.length:
            return None
        codec.pack_into(lease.view.data, layout, trajectory)
        payload = common_pb2.Payload(tensors=layout.tensors, length=layout.length)
        payload.xxh3 = xxhash.xxh3_64_intdigest(lease.view[: layout.length].data)
        payload.shm.CopyFrom(replace(extent, length=layout.length).message())
        return payload

    def close(self, job: store_pb2.Job) -> None:
        """Let go of a job's room."""
        _, lease = self._open.pop(_key(job), (None, None))
        if lease is not None:
            lease.close()

    def close_all(self) -> None:
        """Let go of all."""
        for _, lease in self._open.values():
            lease.close()
        self._open.clear()

    def _tell(self, way: str) -> None:
        """One log line whenever the way changes."""
        if way.partition(":")[0] != self._told:
            self._told = way.partition(":")[0]
            log.info(way)


def _key(job: store_pb2.Job) -> Key:
    key = job.key
    return job.evaluation, key.group, key.member, key.attempt
