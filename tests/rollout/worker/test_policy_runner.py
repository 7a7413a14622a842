"""Sessions share policy calls, weights swap between calls only, and no session can hurt another."""

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from services.common.errors import DvlaError, InvalidInput
from services.common.spec import Array, FloatArray
from services.common.telemetry import Telemetry
from services.policies.base import Act, Evaluation, Inputs, Mode, Policy, Record
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.registry import build_policy
from services.rollout.worker.policy_runner import Chunk, PolicyRunner, Row, VersionKey


class MarkPolicy(Policy):
    """Answers its own `number` for each row, reading it anew each time; waits at `gate` before it begins."""

    def __init__(self, number: int = 0, row_seconds: float = 0.0) -> None:
        super().__init__()
        self.number, self.row_seconds = number, row_seconds
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.batches: list[int] = []

    def preprocess(self, observation: Mapping[str, Array], instructions: Sequence[str]) -> Inputs:
        self.waiting.set()
        assert self.gate.wait(20)
        if any(text == "bad" for text in instructions):
            raise InvalidInput("a bad row")
        return {"state": torch.from_numpy(observation["state"])}

    def act(self, inputs: Inputs, mode: Mode, noise: RowNoise) -> Act:
        rows = len(noise)
        self.batches.append(rows)
        actions = torch.zeros(rows, 2, 1)
        for row in range(rows):
            time.sleep(self.row_seconds)
            actions[row] = self.number
        return Act(actions, {"row": inputs["state"]}, torch.zeros(rows, 2, 1))

    def postprocess(self, actions: Tensor) -> FloatArray:
        out: FloatArray = actions.numpy()
        return out

    def evaluate(self, inputs: Inputs, record: Record) -> Evaluation:
        raise NotImplementedError

    def sft_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor, noise: RowNoise) -> Tensor:
        raise NotImplementedError


def make_row(
    mark: float = 0.0, key: str = "k", mode: Mode = "train", pin: VersionKey | None = None, text: str = "go"
) -> Row:
    return Row({"state": np.array([mark, 1, 2], np.float32)}, text, key, mode, pin)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry("rollout", "w")


@pytest.fixture
def runner(telemetry: Telemetry) -> Iterator[PolicyRunner]:
    runner = PolicyRunner(telemetry, max_batch=8, threads=1, device="cpu")
    yield runner
    runner.close()
    assert not runner._thread.is_alive()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 20)


async def held(runner: PolicyRunner, policy: MarkPolicy, *requests: list[Row]) -> list["asyncio.Task[list[Chunk]]"]:
    """The first request is being answered and waits at the gate; the others wait behind it."""
    policy.gate.clear()
    policy.waiting.clear()
    tasks = [asyncio.create_task(runner.act(requests[0]))]
    await until(policy.waiting)
    for request in requests[1:]:
        tasks.append(asyncio.create_task(runner.act(request)))
        await asyncio.sleep(0)
    return tasks


async def test_waiting_sessions_share_one_call_and_each_gets_its_own_rows(
    runner: PolicyRunner, telemetry: Telemetry
) -> None:
    policy = MarkPolicy(7)
    runner.swap((1, 3), policy)
    requests = [[make_row(10 * n + i) for i in range(size)] for n, size in enumerate((1, 2, 3, 1))]
    tasks = await held(runner, policy, *requests)
    policy.gate.set()
    answers = await asyncio.gather(*tasks)
    assert policy.batches == [1, 6]
    assert telemetry.metrics() == {"policy_calls": 2, "policy_rows": 7}
    for request, chunks in zip(requests, answers, strict=True):
        assert [chunk.record["row"][0] for chunk in chunks] == [row.observation["state"][0] for row in request]
        assert {chunk.version for chunk in chunks} == {(1, 3)}
        assert all((chunk.action == 7).all() for chunk in chunks)


async def test_no_call_is_larger_than_the_limit(runner: PolicyRunner) -> None:
    policy = MarkPolicy()
    runner.swap((1, 1), policy)
    tasks = await held(runner, policy, [make_row()], *([[make_row(n)] * 5 for n in range(3)]), [make_row(9)] * 20)
    policy.gate.set()
    answers = await asyncio.gather(*tasks)
    assert [len(chunks) for chunks in answers] == [1, 5, 5, 5, 20]
    assert max(policy.batches) == 8
    assert sum(policy.batches) == 36


async def test_modes_and_versions_never_share_a_call(runner: PolicyRunner) -> None:
    live, old = MarkPolicy(9), MarkPolicy(5)
    runner.swap((1, 9), live)
    runner.pin((1, 5), old)
    rows = [make_row(0), make_row(1, mode="eval", pin=(1, 5)), make_row(2, mode="eval"), make_row(3)]
    chunks = await runner.act(rows)
    assert [int(chunk.action[0, 0]) for chunk in chunks] == [9, 5, 9, 9]
    assert [chunk.version for chunk in chunks] == [(1, 9), (1, 5), (1, 9), (1, 9)]
    assert [chunk.record["row"][0] for chunk in chunks] == [0, 1, 2, 3]
    assert sorted(live.batches) == [1, 2]
    assert old.batches == [1]


async def test_weights_swap_between_calls_and_never_inside_one(runner: PolicyRunner) -> None:
    """A writer does what the receiver does, as fast as it can; every answer must be of one version, and name it."""
    spare: Policy | None = MarkPolicy(0, row_seconds=0.0005)
    runner.swap((1, 0), MarkPolicy(0, row_seconds=0.0005))
    stop = threading.Event()

    def write() -> None:
        nonlocal spare
        number = 0
        while not stop.is_set():
            number += 1
            runner.settle()
            assert isinstance(spare, MarkPolicy)
            spare.number = number  # as load_state does, in place
            spare = runner.swap((1, number), spare)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(30):
            answers = await asyncio.gather(*(runner.act([make_row()] * 3) for _ in range(3)))
            for chunk in (chunk for chunks in answers for chunk in chunks):
                assert (chunk.action == chunk.version[1]).all()
    finally:
        stop.set()
        await asyncio.to_thread(writer.join)
    assert runner.version is not None
    assert runner.version[1] > 5


async def test_settle_waits_for_the_call_that_began_before(runner: PolicyRunner) -> None:
    policy = MarkPolicy(1)
    assert runner.swap((1, 1), policy) is None
    [task] = await held(runner, policy, [make_row()])
    assert runner.swap((1, 2), MarkPolicy(2)) is policy
    settled = asyncio.create_task(asyncio.to_thread(runner.settle))
    await asyncio.sleep(0.05)
    assert not settled.done()  # the replaced policy is still in use
    policy.gate.set()
    await asyncio.wait_for(settled, 10)
    assert (await task)[0].version == (1, 1)
    assert (await runner.act([make_row()]))[0].version == (1, 2)


async def test_only_pinned_versions_can_be_asked_for_and_old_pins_go(runner: PolicyRunner) -> None:
    for update in (1, 2, 3):
        runner.pin((1, update), MarkPolicy(update))
    assert [runner.is_pinned((1, update)) for update in (1, 2, 3)] == [False, True, True]
    with pytest.raises(DvlaError, match=r"version \(1, 1\) is not loaded for evaluation"):
        await runner.act([make_row(pin=(1, 1))])
    assert (await runner.act([make_row(pin=(1, 2))]))[0].version == (1, 2)


async def test_without_weights_there_is_a_clear_error(runner: PolicyRunner) -> None:
    assert runner.version is None
    with pytest.raises(DvlaError, match="no weights yet"):
        await runner.act([make_row()])


async def test_an_error_reaches_everybody_who_waits(runner: PolicyRunner) -> None:
    policy = MarkPolicy()
    runner.swap((1, 1), policy)
    tasks = await held(runner, policy, *([[make_row(text="bad")]] * 4))
    policy.gate.set()
    answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert [type(answer) for answer in answers] == [InvalidInput] * 4
    assert len(await runner.act([make_row()])) == 1  # and the next call goes on


async def test_a_bad_row_of_one_session_does_not_fail_the_others(runner: PolicyRunner) -> None:
    policy = MarkPolicy(3)
    runner.swap((1, 1), policy)
    tasks = await held(runner, policy, [make_row()], [make_row(1)], [make_row(text="bad")], [make_row(2)] * 2)
    policy.gate.set()
    first, good, bad, also_good = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(bad, InvalidInput)
    for answer, rows in ((first, 1), (good, 1), (also_good, 2)):
        assert isinstance(answer, list)
        assert len(answer) == rows


async def test_a_session_that_gives_up_does_not_stop_inference(runner: PolicyRunner) -> None:
    policy = MarkPolicy()
    runner.swap((1, 1), policy)
    answering, waiting, other = await held(runner, policy, [make_row()], [make_row(1)], [make_row(2)])
    answering.cancel()
    waiting.cancel()
    await asyncio.wait([answering, waiting])
    policy.gate.set()
    assert (await asyncio.wait_for(other, 20))[0].record["row"][0] == 2
    assert (await asyncio.wait_for(runner.act([make_row(3)]), 20))[0].record["row"][0] == 3


@pytest.mark.parametrize("family", ["tiny-oft", "tiny-flow"])
async def test_results_depend_on_the_row_alone(runner: PolicyRunner, family: str) -> None:
    """Neither on the batch, nor on the place in it, nor on who else waits: with a real policy of each family."""
    config = PolicyConfig(family=family, state_dim=3, action_dim=2, chunk=2, value_head=True)
    policy = build_policy(config, seed=1).requires_grad_(False).eval()
    runner.swap((2, 4), policy)
    rows = [
        make_row(0.5, "r/0/0/1/0", text="push"),
        make_row(0.5, "r/1/0/1/0", text="push"),
        make_row(-1, "r/2/0/1/0", text="pull it"),
        make_row(2, "r/3/0/1/0", "eval", text="push"),
        make_row(1, "r/4/0/1/0", text=""),
    ]
    alone = [(await runner.act([row]))[0] for row in rows]
    together = await runner.act(rows)
    backwards = (await runner.act(rows[::-1]))[::-1]
    joined = [chunks[0] for chunks in await asyncio.gather(*(runner.act([row]) for row in rows))]
    for batch in (together, backwards, joined):
        for one, other in zip(alone, batch, strict=True):
            np.testing.assert_allclose(one.action, other.action, atol=1e-5)
            np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-4)
            assert one.value == pytest.approx(other.value, abs=1e-5)
            assert one.record.keys() == policy.spec.record.keys()
            for name, (shape, dtype) in policy.spec.record.items():
                assert (one.record[name].shape, one.record[name].dtype) == (shape, np.dtype(dtype))
                np.testing.assert_allclose(one.record[name].astype(float), other.record[name].astype(float), atol=1e-5)
            assert other.version == (2, 4)
            assert other.action.dtype == np.float32
            assert other.action.shape == (2, 2)
    assert not np.array_equal(alone[0].action, alone[1].action)  # the same input with another key


async def test_closing_ends_the_thread_after_what_waits(telemetry: Telemetry) -> None:
    runner = PolicyRunner(telemetry, max_batch=2, threads=1, device="cpu")
    runner.swap((1, 1), MarkPolicy())
    task = asyncio.create_task(runner.act([make_row()]))
    await asyncio.sleep(0)
    await asyncio.to_thread(runner.close)
    assert len(await task) == 1


async def test_rows_wait_for_rows_of_other_sessions_but_not_for_ever(telemetry: Telemetry) -> None:
    runner, policy = PolicyRunner(telemetry, max_batch=8, threads=1, device="cpu"), MarkPolicy(1)
    runner.batch_wait = 0.3
    runner.swap((1, 1), policy)
    try:
        began = time.monotonic()
        await runner.act([make_row()])
        assert time.monotonic() - began >= 0.3, "alone, it waits until its time is over"
        first = asyncio.create_task(runner.act([make_row()]))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, runner.act([make_row(), make_row()]))
        assert policy.batches == [1, 3]
        runner.callers, began = 2, time.monotonic()
        await asyncio.gather(*(runner.act([make_row()]) for _ in range(2)))
        assert policy.batches == [1, 3, 2]
        runner.callers = 1
        await runner.act([make_row()])
        assert policy.batches == [1, 3, 2, 1]
    finally:
        runner.close()
