"""The toy task in this process: a biased warm start, episodes of the current policy, groups for the learner."""

from collections.abc import Sequence

import numpy as np
import torch

from services.common.spec import Array
from services.common.trajectory import Trajectory, instruction_array
from services.learner.episodes import EpisodeRules, Member, PreparedGroup, prepare_group
from services.policies.base import Policy, numpy_record
from services.policies.config import PolicyConfig
from services.policies.demodata import Demos
from services.policies.noise import RowNoise
from services.policies.registry import build_policy
from services.policies.sft import SftConfig, train_sft
from services.rollout.worker.episode import facts
from services.sim.chunks import ChunkRunner
from services.sim.experts import Expert, with_noise
from services.sim.toy import ToySim
from services.sim.vector import Start

TASK = "reach"
SPEC = ToySim(1).spec


def warm_start(steps: int = 300, bias: float = 1.2, episodes: int = 100, **settings: object) -> Policy:
    """A policy that imitates an expert who walks beside the goal."""
    sim, expert, rng = ToySim(episodes), Expert(TASK, SPEC.action, bias), np.random.default_rng(0)
    slots = np.arange(episodes)
    sim.reset(slots, [Start(TASK, sim.make_start(TASK, 10**6 + i), i) for i in range(episodes)])
    states, labels = [], []
    for _ in range(10):
        states.append(sim.privileged_state(slots))
        labels.append(expert(states[-1]))
        sim.step(slots, np.clip(with_noise(labels[-1], 0.1, rng), -1, 1))
    demos = Demos(
        observation={"state": np.stack(states, 1).reshape(-1, 4)},
        action=np.stack(labels, 1).reshape(-1, 2),
        episode=slots.repeat(10),
        instruction=np.zeros(10 * episodes, np.int64),
        instructions=(SPEC.task(TASK).instruction,),
    )
    policy = build_policy(PolicyConfig.for_sim(SPEC, **({"chunk": 4} | settings)))
    return train_sft(policy, demos, SftConfig(steps=steps, batch=64))


def play(policy: Policy, seeds: Sequence[int], version: tuple[int, int], key: str) -> list[Member]:
    """One episode for each seed, all at the same time, with final observations at truncations."""
    sim = ToySim(len(seeds))
    runner, slots = ChunkRunner(sim), np.arange(len(seeds))
    starts = [Start(TASK, sim.make_start(TASK, seed), seed) for seed in seeds]
    seen = {"state": runner.reset(slots, starts, np.ones(len(seeds), np.bool_)).observation["state"]}
    rows: list[list[dict[str, Array]]] = [[] for _ in seeds]
    done: dict[int, Trajectory] = {}
    instruction = SPEC.task(TASK).instruction
    while len(slots := runner.running):
        state = seen["state"]
        noise = RowNoise([f"{key}/{slot}/{len(rows[slot])}" for slot in slots])
        with torch.no_grad():
            act = policy.act(policy.preprocess({"state": state}, [instruction] * len(slots)), "train", noise)
        action, record = policy.postprocess(act.actions), numpy_record(act.record)
        result = runner.advance(slots, action, final="truncated")
        after = {int(row): {n: a[at] for n, a in result.observation.items()} for at, row in enumerate(result.observed)}
        for row, slot in enumerate(slots.tolist()):
            chunk: dict[str, Array] = {f"record/{name}": array[row] for name, array in record.items()}
            chunk |= {"obs/state": state[row], "action": action[row], "executed_action": result.action[row]}
            chunk |= {"log_prob": act.log_prob[row].numpy(), "version": np.array(version, np.int64)}
            chunk |= {"reward": result.reward[row], "success": result.success[row]}
            chunk |= {"executed": np.asarray(result.executed[row], np.int32)}
            rows[slot].append(chunk)
            if result.terminated[row] or result.truncated[row]:
                whole = {name: np.stack([each[name] for each in rows[slot]]) for name in chunk}
                whole["ends"] = np.array([result.terminated[row], result.truncated[row]])
                whole["instruction"] = instruction_array(instruction)
                if result.truncated[row] and not result.terminated[row]:
                    whole |= {f"final_obs/{name}": array[None] for name, array in after[row].items()}
                done[slot] = whole
        going = [row for row, slot in enumerate(slots.tolist()) if slot not in done]
        seen = {"state": np.stack([after[row]["state"] for row in going])} if going else {}
    return [_member(done[slot]) for slot in range(len(seeds))]


def groups(
    policy: Policy, number: int, size: int, first_seed: int, version: tuple[int, int], rules: EpisodeRules
) -> list[PreparedGroup]:
    """`number` groups of `size` episodes from one start each; uniform ones are dropped where episodes are compared."""
    seeds = [first_seed + index for index in range(number) for _ in range(size)]
    members = play(policy, seeds, version, f"{version}")
    made = [
        prepare_group(index, TASK, members[index * size : (index + 1) * size], policy, rules) for index in range(number)
    ]
    return [group for group in made if size == 1 or group.informative]


def _member(trajectory: Trajectory) -> Member:
    said = facts(trajectory, "success", "toy", "test")
    return Member(
        said.score, said.steps, said.reward_sum, said.success_once, said.success_at_end, trajectory=trajectory
    )
