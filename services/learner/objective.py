"""What a learner optimises: rewards, advantages and the loss. Plain data, no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from services.learner.settings import Checked

Algorithm = Literal["grpo", "rloo", "ppo"]
Score = Literal["success", "sum", "differential"]
Normalisation = Literal["std", "mean", "leave-one-out"]
Objective = Literal["clipped", "decoupled"]
Level = Literal["token", "action", "chunk"]
Weighting = Literal["trajectory", "token"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(Checked):
    """The objective of a learner. A setting that the chosen algorithm does not read is refused."""

    algorithm: Algorithm = "grpo"
    """"grpo" compares the episodes of a group, with clipped ratios; "rloo" compares them without clipping (REINFORCE,
    leave-one-out); "ppo" needs no groups but a policy with a value head."""
    group_size: int = 8
    """Episodes from one start state that are compared with each other, G. May be 1 with "ppo"."""
    filter_uniform: bool | None = None
    """The store discards and replaces groups whose episodes all scored the same. Default: true, but never for "ppo",
    which learns from them as well."""
    score: Score = "success"
    """Return of an episode: "success" (1 if it ever succeeded), "sum" (sum of rewards) or "differential" (sum of the
    changes of the reward from step to step, which is the last one: for a dense reward that grows towards the goal)."""
    end_on_success: bool = True
    """End training episodes on success."""
    differential_reward: bool = False
    """The simulator's reward is a change of potential already, so that its sum does not punish finishing early."""
    reward_range: tuple[float, ...] = ()
    """Lowest and highest reward of a step that the simulator may send, such as 0 and 1 for a normalised dense reward:
    a group with another one is refused. Empty for no check."""
    advantage: Normalisation | Literal["auto"] = "auto"
    """Advantages within a group: divided by the standard deviation ("std", the default of "grpo"), only centred
    ("mean"), or "leave-one-out" (the default of "rloo")."""
    objective: Objective = "decoupled"
    """"clipped" compares with the policy that acted; "decoupled" clips around the policy at the start of the update
    and weighs stale data by a truncated importance weight. Both are the same on data of the current weights; with
    staleness 1, "clipped" lost up to half of the success in trials where "decoupled" lost none."""
    ratio_level: Level | Literal["auto"] = "auto"
    """Level of the importance ratios; "auto" takes the policy's own."""
    weighting: Weighting = "trajectory"
    """Every trajectory weighs the same, or every token."""
    clip_low: float = 0.2
    """Ratios are clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """Ratios are clipped above 1 + clip_high."""
    dual_clip: float = 0.0
    """Bound for negative advantages, in advantages; above 1, or 0 for none."""
    importance_cap: float = 2.0
    """Largest importance weight of stale data, of the decoupled objective and of "rloo"."""
    entropy_bonus: float = 0.0
    """Reward of a nat of entropy per action dimension."""
    kl_weight: float = 0.0
    """Weight of the divergence from the policy that the run started from."""
    informative_share: float = 1.0
    """Share of the chunks of each episode that are trained, drawn by how much successes and failures differ there."""
    demo_weight: float = 0.0
    """Weight of the imitation loss on demonstrations, against collapse."""
    demonstrations: tuple[str, ...] = ()
    """Folders with these demonstrations."""
    demo_rows: int = 64
    """Chunks of demonstrations in each optimiser step."""
    discount: float = 0.99
    """Discount of a control step, of "ppo"."""
    gae_lambda: float = 0.95
    """Weight of longer returns in the advantages of "ppo", per chunk."""
    value_weight: float = 0.5
    """Weight of the value loss of "ppo"."""
    value_clip: float = 0.0
    """Largest change of a value estimate that the value loss rewards, of "ppo"; 0 for any."""

    @property
    def groups(self) -> bool:
        """Whether the algorithm compares the members of a group, so that they must share their start state."""
        return self.algorithm != "ppo"

    @property
    def filters_uniform(self) -> bool:
        """`filter_uniform` with its default resolved."""
        return self.groups if self.filter_uniform is None else self.filter_uniform

    @property
    def normalisation(self) -> Normalisation | None:
        """`advantage` with its default resolved; None for an algorithm without groups."""
        if self.advantage != "auto":
            return self.advantage
        return {"grpo": "std", "rloo": "leave-one-out"}.get(self.algorithm)  # type: ignore[return-value]

    def _check_objective(self) -> None:
        for name, kind in (
            ("algorithm", Algorithm),
            ("score", Score),
            ("objective", Objective),
            ("weighting", Weighting),
        ):
            self._one_of(name, get_args(kind))
        self._one_of("advantage", ("auto", *get_args(Normalisation)))
        self._one_of("ratio_level", ("auto", *get_args(Level)))
        self._check_groups()
        self._check_score()
        self._check_clips()
        self._check_regularisers()
        self._check_values()

    def _check_groups(self) -> None:
        if self.groups:
            self._at_least("group_size", 2, f"because {self.algorithm} compares the episodes of a group")
        self._at_least("group_size", 1)
        if self.filter_uniform and not self.groups:
            self._refuse("filter_uniform", "false with algorithm = 'ppo', which learns from equal scores as well")
        if self.advantage != "auto" and not self.groups:
            self._refuse("advantage", "no such setting unless algorithm = 'grpo', which alone reads it; leave it out")
        if self.algorithm == "rloo" and self.advantage not in ("auto", "leave-one-out"):
            self._refuse("advantage", "'leave-one-out', which algorithm = 'rloo' is named after; or use 'grpo'")

    def _check_score(self) -> None:
        if self.score == "sum" and self.end_on_success and not self.differential_reward:
            self._refuse(
                "score",
                "success together with end_on_success, because a summed dense reward then punishes finishing early; "
                "set score = 'differential' or end_on_success = false, or differential_reward = true if the reward is "
                "a change of potential",
            )
        if self.differential_reward and self.score != "sum":
            self._refuse("differential_reward", "false unless score = 'sum', the only score that it is about")
        if self.reward_range:
            low_high = tuple(self.reward_range)
            if len(low_high) != 2 or not -float("inf") < low_high[0] < low_high[1] < float("inf"):
                self._refuse("reward_range", "two finite numbers, the lower one first, or none")
            self._unless("reward_range", self.score != "success", "score = 'sum' or 'differential'")

    def _check_clips(self) -> None:
        for name in ("clip_low", "clip_high"):
            self._above(name, 0)
        if self.clip_low >= 1:
            self._refuse("clip_low", "less than 1, because a ratio is never negative")
        if self.dual_clip != 0 and not 1 < self.dual_clip < float("inf"):
            self._refuse("dual_clip", "more than 1 (3 is usual), or 0 for none")
        for name in ("clip_low", "clip_high", "dual_clip", "objective"):
            self._unless(name, self.algorithm != "rloo", "algorithm = 'grpo' or 'ppo'")
        self._at_least("importance_cap", 1)
        weighed = self.algorithm == "rloo" or self.objective == "decoupled"
        self._unless("importance_cap", weighed, "objective = 'decoupled'")

    def _check_regularisers(self) -> None:
        for name in ("entropy_bonus", "kl_weight", "demo_weight"):
            self._at_least(name, 0)
        if not 0 < self.informative_share <= 1:
            self._refuse("informative_share", "more than 0 and at most 1")
        self._unless("informative_share", self.groups, "algorithm = 'grpo' or 'rloo'")
        self._at_least("demo_rows", 1)
        if self.demo_weight and not self.demonstrations:
            self._refuse("demonstrations", "at least one folder of demonstrations, because demo_weight is not 0")
        for name in ("demonstrations", "demo_rows"):
            self._unless(name, bool(self.demo_weight), "demo_weight is above 0")

    def _check_values(self) -> None:
        for name, low in (("discount", 0), ("gae_lambda", 0)):
            if not low <= getattr(self, name) <= 1:
                self._refuse(name, "0 to 1")
        self._above("value_weight", 0)
        self._at_least("value_clip", 0)
        for name in ("discount", "gae_lambda", "value_weight", "value_clip"):
            self._unless(name, self.algorithm == "ppo", "algorithm = 'ppo'")
