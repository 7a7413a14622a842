"""RLinf's bucket weight sync on a CPU, driven line by line. Runs in an environment of its own (peer_rlinf.sh makes it).

    python benchmarks/peer_rlinf.py BYTES RECEIVERS

For each line on stdin one sync; prints one JSON object with the seconds from the sender's start to the last receiver's
applied weights, on CLOCK_MONOTONIC. Same tensors as ours: bfloat16, 8 MB each. Buckets of 64 MB.
"""

import json
import os
import sys
import time

os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import torch
from rlinf.hybrid_engines.weight_syncer.bucket_syncer import BucketWeightSyncer
from rlinf.scheduler import Cluster, NodePlacementStrategy, Worker
from torch import nn

TENSOR, BUCKET = 8 * 1024 * 1024, 64 * 1024 * 1024
SENDER, RECEIVER = "bench_sender", "bench_receiver"


class Model(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        for number in range(size // TENSOR):
            tensor = nn.Parameter(torch.ones(TENSOR // 2048, 1024, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(f"layer_{number}", tensor)


class Peer(Worker):
    """One end of the sync; `receivers` ranks take part."""

    def __init__(self, size: int, receivers: int, sending: bool) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.model, self.sending = Model(size), sending
        self.syncer = BucketWeightSyncer(BUCKET, None, "cpu")
        ranks = list(range(receivers))
        self.groups = [(SENDER, 0), (RECEIVER, ranks)]
        self.version = 0

    async def transfer(self, data=None):  # type: ignore[no-untyped-def]
        work = self.broadcast(data, groups=self.groups, src=(SENDER, 0), async_op=True)
        return await work.async_wait()

    async def sync(self) -> float:
        """One version; returns when it began (sender) or was applied (receiver)."""
        state = self.model.state_dict()
        if self.sending:
            if not self.syncer.sender_initialized():
                await self.syncer.init_sender(state, list(state), self.transfer)
            self.version += 1
            began = time.monotonic()
            await self.syncer.sync(state, self.transfer, self.version)
            return began
        if not self.syncer.receiver_initialized():
            await self.syncer.init_receiver(state, self.transfer)
        await self.syncer.apply(self.model, self.transfer)
        return time.monotonic()


def main(size: int, receivers: int) -> None:
    cluster = Cluster(num_nodes=1)
    sender = Peer.create_group(size, receivers, True).launch(
        cluster, placement_strategy=NodePlacementStrategy([0]), name=SENDER
    )
    receiver = Peer.create_group(size, receivers, False).launch(
        cluster, placement_strategy=NodePlacementStrategy([0] * receivers), name=RECEIVER
    )

    def once() -> float:
        waiting, sending = receiver.sync(), sender.sync()
        began = sending.wait()[0]
        return max(waiting.wait()) - began

    for _ in range(5):
        once()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": once()}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
