"""What a policy is: architecture, what it reads, how it samples. Plain data, no torch, JSON both ways.

The configuration travels with the weights (manifest and checkpoint), so that every process that loads a version
samples and scores in the same way: a differing temperature or step count would silently bias the ratios.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NoReturn, get_args

from services.common.errors import ConfigError
from services.common.spec import SimSpec
from services.policies.families import FLOW, OFT, family_target

RatioLevel = Literal["token", "action", "chunk"]
FlowMethod = Literal["sde", "noise", "fpo"]
Reduction = Literal["mean", "sum"]
ActionNorm = Literal["quantile", "meanstd"]
DType = Literal["float32", "bfloat16"]

VERSION = 1
"""Of the meaning of these fields. Raise it when the same fields would sample or score differently."""

RATIO_LEVEL: dict[str, RatioLevel] = {OFT: "token", FLOW: "chunk"}


@dataclass(frozen=True)
class Size:
    """Transformer of `depth` layers of `width`; the flow head's expert has as many layers of `expert` width."""

    width: int
    depth: int
    heads: int
    expert: int


SIZES = {
    "xs": Size(64, 2, 4, 48),
    "s": Size(128, 4, 4, 96),
    "m": Size(256, 6, 8, 160),
    "l": Size(384, 8, 12, 224),
    "xl": Size(512, 9, 16, 256),
}


@dataclass(frozen=True)
class PolicyConfig:
    """One policy, completely. Raises ConfigError on an impossible value.

    family: "tiny-oft" (discrete tokens), "tiny-flow" (flow matching), or a registered custom policy.
    size: a key of SIZES.
    chunk, action_dim: C actions of D dimensions per policy call.
    state_dim: length of the "state" observation; 0 reads no state.
    cameras: names of the "rgb/<camera>" observations; image_size: their height and width in pixels.
    patch: side of a square image patch in pixels.
    instruction_bytes: longest instruction in UTF-8 bytes.
    action_norm: "quantile" maps the demonstrations' q01..q99 to [-1, 1]; "meanstd" standardises.
    ratio_level: at which level the learner forms importance ratios; "auto" takes the family's own.
    temperature: of the token head's softmax while sampling.
    denoising_steps: K, of the flow head. noise_level: a, of Flow-SDE.
    flow_method: "sde" (one random step is stochastic), "noise" (all are, learned standard deviation) or "fpo" (none
    is; minus the flow-matching loss stands in for the log-probability, per chunk only).
    noise_reduction: how Flow-Noise joins the K + 1 log-probabilities of a chain.
    flow_samples: noise draws for the loss that FPO takes for a log-probability.
    value_head: whether there is one (PPO).
    token_spread: standard deviation, in normalised units, of the token head's soft imitation targets; 0 is one-hot.
    dropout: share of prefix features zeroed during imitation; never while acting or scoring.
    dtype: of the parameters; log-probabilities are float32 in any case.
    autocast: compute in bfloat16 with float32 parameters, while acting and while scoring.
    compile: the layers are compiled by torch, while acting and while scoring; needs a C++ compiler and minutes.
    options: settings of a custom policy.
    """

    action_dim: int
    family: str = FLOW
    size: str = "xs"
    chunk: int = 5
    state_dim: int = 0
    cameras: tuple[str, ...] = ()
    image_size: int = 64
    patch: int = 8
    instruction_bytes: int = 64
    action_norm: ActionNorm = "quantile"
    ratio_level: RatioLevel | Literal["auto"] = "auto"
    temperature: float = 1.0
    token_spread: float = 0.1
    denoising_steps: int = 4
    flow_method: FlowMethod = "sde"
    noise_reduction: Reduction = "mean"
    noise_level: float = 0.5
    flow_samples: int = 8
    value_head: bool = False
    dropout: float = 0.0
    dtype: DType = "float32"
    autocast: bool = False
    compile: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.cameras, tuple | list):
            _refuse("cameras", self.cameras, "a list of names")
        object.__setattr__(self, "cameras", tuple(self.cameras))
        self._check_options()
        self._check_architecture()
        self._check_inputs()
        self._check_sampling()

    @property
    def shape(self) -> Size:
        """Widths and depth of the named size."""
        return SIZES[self.size]

    @property
    def effective_ratio_level(self) -> RatioLevel:
        """`ratio_level` with "auto" resolved."""
        return RATIO_LEVEL.get(self.family, "chunk") if self.ratio_level == "auto" else self.ratio_level

    @property
    def chunk_only(self) -> bool:
        """Whether its log-probability is that of a whole chunk only."""
        return self.family == FLOW and self.flow_method == "fpo"

    @property
    def observation(self) -> tuple[str, ...]:
        """Names of the observation tensors it reads."""
        return (("state",) if self.state_dim else ()) + tuple(f"rgb/{camera}" for camera in self.cameras)

    @classmethod
    def for_sim(cls, sim: SimSpec, **settings: Any) -> "PolicyConfig":
        """A policy that reads every observation of this simulator and drives all its action dimensions."""
        shapes = {tensor.name: tensor.shape for tensor in sim.observation}
        images = {name.removeprefix("rgb/"): shape for name, shape in shapes.items() if name.startswith("rgb/")}
        inferred: dict[str, Any] = {
            "action_dim": sim.action.dim,
            "state_dim": shapes["state"][0] if "state" in shapes else 0,
            "cameras": tuple(images),
        }
        if images and settings.get("cameras", images):
            inferred["image_size"] = next(iter(images.values()))[0]
        return cls(**(inferred | settings))

    def to_json(self) -> dict[str, Any]:
        """JSON-able fields, with the version of their meaning."""
        return {"version": VERSION} | asdict(self) | {"cameras": list(self.cameras)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PolicyConfig":
        """The inverse of `to_json`. Raises ConfigError on another version and on unknown or missing fields."""
        values = dict(data)
        version = values.pop("version", None)
        if version != VERSION:
            raise ConfigError(
                f"policy configuration has version {version!r}, this program reads {VERSION}: "
                "use the program version that wrote it, or train the policy again"
            )
        known = {f.name for f in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ConfigError(f"unknown policy setting {unknown[0]!r}: expected some of {', '.join(sorted(known))}")
        if "action_dim" not in values:
            raise ConfigError("policy setting action_dim is missing: give the simulator's action dimension")
        return cls(**values)

    def _check_options(self) -> None:
        try:
            plain = json.loads(json.dumps(dict(self.options), allow_nan=False))
        except (TypeError, ValueError):
            _refuse("options", self.options, "a table of values that JSON can hold")
        object.__setattr__(self, "options", plain)

    def _check_architecture(self) -> None:
        if not isinstance(self.family, str):
            _refuse("family", self.family, "a name")
        family_target(self.family)
        _one_of("size", self.size, tuple(SIZES))
        _one_of("dtype", self.dtype, get_args(DType))
        _one_of("action_norm", self.action_norm, get_args(ActionNorm))
        _one_of("ratio_level", self.ratio_level, (*get_args(RatioLevel), "auto"))
        _integer("chunk", self.chunk, 1, 1000)
        _integer("action_dim", self.action_dim, 1, 1000)
        for name in ("value_head", "autocast", "compile"):
            _boolean(name, getattr(self, name))
        if self.autocast and self.dtype != "float32":
            _refuse("autocast", True, "false with dtype = 'bfloat16', which computes in it anyway")
        _number("dropout", self.dropout, 0.0, 0.9)

    def _check_inputs(self) -> None:
        _integer("state_dim", self.state_dim, 0, 100_000)
        _integer("instruction_bytes", self.instruction_bytes, 1, 4096)
        if len(set(self.cameras)) != len(self.cameras) or not all(c and c == str(c) for c in self.cameras):
            _refuse("cameras", self.cameras, "distinct, non-empty names")
        if not self.state_dim and not self.cameras:
            _refuse("state_dim", 0, "a positive length when there is no camera, because a policy must read something")
        _integer("patch", self.patch, 2, 64)
        _integer("image_size", self.image_size, 2, 1024)
        if self.patch % 2:
            _refuse("patch", self.patch, "an even number of pixels")
        if self.cameras and self.image_size % self.patch:
            _refuse("image_size", self.image_size, f"a multiple of patch ({self.patch})")

    def _check_sampling(self) -> None:
        _number("temperature", self.temperature, 1e-3, 100.0)
        _number("token_spread", self.token_spread, 0.0, 1.0)
        _integer("denoising_steps", self.denoising_steps, 1, 255)
        _one_of("flow_method", self.flow_method, get_args(FlowMethod))
        _one_of("noise_reduction", self.noise_reduction, get_args(Reduction))
        _number("noise_level", self.noise_level, 1e-3, 10.0)
        _integer("flow_samples", self.flow_samples, 1, 255)
        if self.chunk_only and self.effective_ratio_level != "chunk":
            _refuse("ratio_level", self.ratio_level, "chunk with flow_method = 'fpo', whose loss is that of a chunk")
        self._check_read()
        if self.family == OFT and self.action_norm != "quantile":
            _refuse("action_norm", self.action_norm, f"quantile, because the token bins of {OFT} span [-1, 1]")

    def _check_read(self) -> None:
        """A setting that a built-in family does not read must keep its default: else somebody would believe in it."""
        oft, flow = self.family == OFT, self.family == FLOW
        for name, unread, reader in (
            ("flow_method", oft, FLOW),
            ("denoising_steps", oft, FLOW),
            ("temperature", flow, OFT),
            ("token_spread", flow, OFT),
            ("noise_level", oft or (flow and self.flow_method != "sde"), f"{FLOW} with flow_method = 'sde'"),
            ("noise_reduction", oft or (flow and self.flow_method != "noise"), f"{FLOW} with flow_method = 'noise'"),
            ("flow_samples", oft or (flow and self.flow_method != "fpo"), f"{FLOW} with flow_method = 'fpo'"),
            ("image_size", not self.cameras, "a policy with cameras"),
            ("patch", not self.cameras, "a policy with cameras"),
        ):
            if unread and getattr(self, name) != getattr(PolicyConfig, name):
                _refuse(name, getattr(self, name), f"no such setting here: only {reader} reads it; leave it out")


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise ConfigError(f"policy setting {name} is {value!r}, expected {expected}: change it in the recipe")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _refuse(name, value, f"one of {', '.join(allowed)}")


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(name, value, f"a whole number from {low} to {high}")


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        _refuse(name, value, f"a number from {low} to {high}")
