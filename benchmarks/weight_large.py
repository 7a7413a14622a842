"""Versions as large as the memory allows: 6 GB with two files, and 14 GB taken tensor by tensor.

    python -m benchmarks.weight_large [--part two-files|streamed|frames ...] [--scale 1.0] [--json FILE]

two-files: four versions of 6 GB one after another, with two files in all; a reader keeps up and checks all hashes.
streamed:  a version of 14 GB (7 billion bfloat16), in shared memory; the reader has room for one tensor.
frames:    the same through gRPC frames, as to a reader on another machine.
The publisher makes tensors one by one in the file itself, so that nothing is in memory twice. tmpfs counts as memory.
"""

import argparse
import resource
import time
from pathlib import Path

import numpy as np

from benchmarks.common import Report, end_in_order
from benchmarks.weight_hosts import Child, children, shared_memory, short_folder, weights_server
from services.common import bundle
from services.common.bundle import Layout, Version, plan
from services.common.server import configure_logging
from services.common.weights_client import WeightPublisher

GB = 10**9
LAYER = 128 * 1024 * 1024  # bytes of a tensor


def layout_of_size(size: float) -> Layout:
    """bfloat16 tensors of 128 MB."""
    count = max(2, round(size / LAYER))
    return plan((f"layer.{i}", "bfloat16", (LAYER // 8192, 4096)) for i in range(count))


def fill(layout: Layout, buffer: np.ndarray, seed: int) -> None:
    """Numbers that differ from version to version and from tensor to tensor, made in place."""
    block = np.random.default_rng(seed).integers(0, 2**16, 1024 * 1024, dtype=np.uint16)
    for number, tensor in enumerate(layout.tensors):
        words = buffer[tensor.offset : tensor.offset + tensor.length].view(np.uint16).reshape(-1, len(block))
        np.add(block, np.uint16(number), out=words)


def publish(report: Report, name: str, size: float, versions: int, files: int, reading: str) -> None:
    """Publish so many versions in so many files; the reader must have each before the next replaces it."""
    layout, took = layout_of_size(size), list[float]()
    with short_folder() as place, shared_memory() as folder:
        address, budget = f"unix:{place}/w.sock", files * layout.length / 2**30 + 0.1
        settings = {"keep": 1, "max_files": 2, "budget_gib": budget}
        own = folder if reading != "frames" else f"{place}/apart"
        with weights_server(address, folder, **settings) as server:
            writer = WeightPublisher(address, "policy", folder=folder, files=files)
            reader = Child("reader", address=address, folder=own, discard=True)
            with children(reader):
                reader.read()
                for update in range(1, versions + 1):
                    while (stage := writer.stage(layout.length)) is None:
                        time.sleep(0.05)
                    fill(layout, stage.buffer, update)
                    started = time.monotonic()
                    writer.publish(bundle.seal(layout, "policy", Version(1, update), stage.buffer), stage)
                    said = reader.until(update)
                    took.append(said["at"] - started)
                    assert said["tensors"] == len(layout.tensors)
                highest = _highest(reader.process.pid)
                report.add(f"{name}: reader's own memory at its highest", highest / 1e6, "MB")
                report.add(f"{name}: weights server's own memory", _highest(server.pid) / 1e6, "MB")
            writer.close()
    report.add(f"{name}: hash, publish, take and verify", took, "s", note=f"{layout.length / min(took) / 1e9:.2f} GB/s")
    report.add(f"{name}: versions through", versions, "", "all", True)


def _highest(pid: int) -> float:
    """Bytes of memory of its own (not shared) that a process has now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return float(line.split()[1]) * 1024
    return 0.0


PARTS = {
    "two-files": lambda report, scale: publish(report, "6 GB, two files", 6 * GB * scale, 4, 2, "shm"),
    "streamed": lambda report, scale: publish(report, "14 GB, tensor by tensor", 14 * GB * scale, 1, 1, "shm"),
    "frames": lambda report, scale: publish(report, "14 GB, frames", 14 * GB * scale, 1, 1, "frames"),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full size, to try it out")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end_in_order()
    configure_logging("warning")
    report = Report("large versions")
    for name in given.part:
        PARTS[name](report, given.scale)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.add("publisher's resident memory at its highest, shared included", own / 1e9, "GB")
    report.write(given.json)


if __name__ == "__main__":
    main()
