"""Health check of a role's container: exit code 0 if the role on this machine says SERVING, else 1 with the reason.

Reads what the role itself reads: DVLA_<ROLE>_LISTEN and DVLA_<ROLE>_TOKEN_FILE, with the role in DVLA_HEALTH_OF.
"""

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.channels import open_channel
from services.common.security import Security

SECONDS = 4.0


def main() -> int:
    """Ask once."""
    prefix = f"DVLA_{os.environ['DVLA_HEALTH_OF'].upper()}_"
    host, _, port = os.environ[prefix + "LISTEN"].rpartition(":")
    address = f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]") else f"{host}:{port}"
    token_file = os.environ.get(prefix + "TOKEN_FILE", "")
    token = Path(token_file).read_text().strip() if token_file else ""
    with open_channel(address, Security(token=token)) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    print(f"{address}: {name}")
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
