"""The learner as a real process beside a real weights server: progress, checkpoint on demand, SIGTERM, restart."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from dvla.v1 import learner_pb2, learner_pb2_grpc

from services.common.channels import open_channel
from services.common.weights_client import fetch_once
from tests.learner.harness import Bench


@contextmanager
def process(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A role; killed at the end if it still runs."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        role = subprocess.Popen([sys.executable, "-m", *arguments], env=environment, stdout=out, stderr=out)
    try:
        yield role
    finally:
        if role.poll() is None:
            role.kill()
        role.wait(30)


def wait_for(stub: learner_pb2_grpc.LearnerServiceStub, update: int) -> learner_pb2.GetProgressResponse:
    deadline = time.monotonic() + 90
    while True:
        try:
            progress: learner_pb2.GetProgressResponse = stub.GetProgress(learner_pb2.GetProgressRequest(), timeout=5)
        except grpc.RpcError:
            progress = learner_pb2.GetProgressResponse()
        if progress.published.update >= update:
            return progress
        assert time.monotonic() < deadline, progress
        time.sleep(0.05)


def test_a_learner_process_from_start_to_end(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    folder, store = bench.folder, bench.store
    weights_at, learner_at, log = f"unix:{folder}/weights", f"unix:{folder}/learner", folder / "log"
    weights = ["services.weights", "--listen", weights_at, "--durable-folder", f"{folder}/durable"]
    weights += ["--shared-folder", f"{folder}/shm"]
    learner = ["services.learner", "--listen", learner_at, "--store", store.address, "--weights", weights_at]
    learner += ["--init", f"{folder}/init", "--output", f"{folder}/run", "--run", "test", "--tasks", "reach"]
    learner += ["--group-size", "3", "--groups-per-update", "2", "--updates", "400", "--minibatches", "2"]
    stub = learner_pb2_grpc.LearnerServiceStub(open_channel(learner_at))

    with process(*weights, log=log):
        with process(*learner, log=log) as first:
            progress = wait_for(stub, 3)
            assert (progress.run, progress.total_updates, progress.published.epoch) == ("test", 400, 1)
            assert progress.metrics["loss"] != 0
            written = stub.Checkpoint(learner_pb2.CheckpointRequest(), timeout=30)
            assert Path(written.path).name == f"1-{written.version.update}"
            assert (Path(written.path) / "manifest.json").is_file()
        # Killed without warning: it goes on from that checkpoint or a later one.
        assert first.returncode == -signal.SIGKILL
        with process(*learner, log=log) as second:
            assert wait_for(stub, written.version.update + 2).published.epoch == 2
            second.terminate()
            assert second.wait(30) == 0, log.read_text()
        stopped_at = store.run.update
        assert set(store.run.acked.values()) == set(range(1, stopped_at + 1))
        assert fetch_once(weights_at, "policy")[0].version.update == stopped_at


def test_failures_are_one_line_with_an_exit_code(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    arguments = ["services.learner", "--listen", f"unix:{bench.folder}/l", "--output", f"{bench.folder}/run"]
    arguments += ["--init", f"{bench.folder}/nothing", "--tasks", "reach"]
    log = bench.folder / "log"
    with process(*arguments, log=log) as role:
        assert role.wait(60) == 2
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "no policy in" in errors[0]
    assert "Traceback" not in log.read_text()
