"""A learner that publishes for ever, to be killed from outside: ADDRESS EPOCH SHARED_FOLDER."""

import sys
from itertools import count

import numpy as np

from services.common.bundle import Version, bundle
from services.common.weights_client import WeightPublisher

ROWS = 40_000  # of 200 bytes: 8 MB, so that a publish takes long enough to be hit


def main(address: str, epoch: int, folder: str) -> None:
    writer = WeightPublisher(address, "policy", folder=folder)
    writer.fence(epoch)
    print("fenced", flush=True)
    for update in count():
        stamp = np.float32(epoch * 1000 + update)
        arrays = {"layer.weight": np.full((ROWS, 50), stamp), "layer.bias": np.full(7, stamp)}
        writer.publish(*bundle("policy", Version(epoch, update), arrays, metadata={"stamp": str(int(stamp))}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
