"""Prints what every replica of every role says of itself, one line each; exit code 1 if a role does not answer.

    docker compose exec learner python /opt/dvla/status.py [--json]

Finds replicas by the service names of docker-compose.yml and sends the token that this container has.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
from dvla.v1 import role_pb2, role_pb2_grpc

from services.common.channels import open_channel
from services.common.security import Security

PORTS = {"sim": 50051, "store": 50052, "rollout": 50053, "weights": 50054, "learner": 50055}
SECONDS = 5.0


def addresses(role: str, port: int) -> list[str]:
    """All addresses behind the role's name; empty if there is none."""
    try:
        found = socket.getaddrinfo(role, port, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted(f"{address[0]}:{port}" for *_, address in found)


def ask(address: str, token: str) -> dict[str, Any]:
    """Status of one replica, or the reason why there is none."""
    with open_channel(address, Security(token=token)) as channel:
        try:
            reply = role_pb2_grpc.RoleServiceStub(channel).GetStatus(role_pb2.GetStatusRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            return {"error": f"{error.code().name}: {error.details()}"}
    idle = {lane.name: round(1 - lane.busy_seconds / max(lane.total_seconds, 1e-9), 2) for lane in reply.lanes}
    return {
        "name": reply.name,
        "uptime_seconds": round(reply.uptime_seconds),
        "idle": idle,
        "metrics": dict(reply.metrics),
        "facts": dict(reply.facts),
    }


def main() -> int:
    """Ask everybody once."""
    files = (os.environ.get(f"DVLA_{role.upper()}_TOKEN_FILE") for role in PORTS)
    token = next((Path(file).read_text().strip() for file in files if file), "")
    answers = {role: {a: ask(a, token) for a in addresses(role, port)} for role, port in PORTS.items()}
    if "--json" in sys.argv:
        print(json.dumps(answers))
    else:
        for role, replicas in answers.items():
            for address, answer in replicas.items() or {"": {"error": "no replica"}}.items():
                print(f"{role:8} {address:22} {json.dumps(answer)}")
    missing = [role for role, replicas in answers.items() if not any("error" not in a for a in replicas.values())]
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
