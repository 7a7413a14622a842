"""What the learner asks of the weights server besides publishing."""

import threading

import structlog
from dvla.v1 import weights_pb2, weights_pb2_grpc

from services.common.channels import CALL_SECONDS, open_channel, translated
from services.common.errors import Unavailable
from services.common.security import Security
from services.learner.threads import delays

log = structlog.get_logger()


def highest_epoch(address: str, model: str, security: Security, stopping: threading.Event) -> int:
    """The highest epoch among the versions of a model, 0 without any. Waits for a server that is away."""
    channel = open_channel(address, security)
    stub = weights_pb2_grpc.WeightsServiceStub(channel)
    try:
        for attempt in delays(stopping):
            try:
                with translated(f"weights server {address}"):
                    reply = stub.ListVersions(weights_pb2.ListVersionsRequest(), timeout=CALL_SECONDS)
            except Unavailable as error:
                if attempt == 0:
                    log.warning("waiting for the weights server", reason=str(error))
                continue
            return max((info.version.epoch for info in reply.versions if info.model == model), default=0)
    finally:
        channel.close()
    return 0
