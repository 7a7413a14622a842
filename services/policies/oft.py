"""`tiny-oft`: discrete action tokens decoded in parallel, as OpenVLA-OFT (arXiv:2502.19645) with the token head.

C * D learned queries follow the prefix; everything attends to everything; one shared linear layer gives 256 logits
per query. Tokens are independent given the observation, so unexecuted ones can be masked exactly.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.policies.backbone import run_layer
from services.policies.base import Act, Evaluation, Inputs, Mode, Record
from services.policies.config import PolicyConfig
from services.policies.noise import RowNoise
from services.policies.tiny import TinyPolicy, exact, in_precision

BINS = 256


class TinyOft(TinyPolicy):
    """Record: `tokens` uint8 [C, D] and the effective `temperature` float32 []."""

    mask_unexecuted = True
    centres: Tensor

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        width = config.shape.width
        self.queries = nn.Parameter(torch.randn(config.chunk * config.action_dim, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BINS)
        edges = torch.linspace(-1.0, 1.0, BINS + 1)
        self.register_buffer("centres", (edges[1:] + edges[:-1]) / 2, persistent=False)
        _smooth_init(self.head, self.centres)

    @staticmethod
    def record_schema(config: PolicyConfig) -> dict[str, tuple[tuple[int, ...], str]]:
        """As the class says."""
        return {"tokens": ((config.chunk, config.action_dim), "uint8"), "temperature": ((), "float32")}

    @torch.no_grad()
    @in_precision
    def act(self, inputs: Inputs, mode: Mode, noise: RowNoise) -> Act:
        """Sample every token (train), or take the likeliest (eval); the actions are bin centres."""
        hidden = self._decode(inputs)
        temperature = hidden.new_full((len(hidden),), self.config.temperature, dtype=torch.float32)
        logits = self._logits(hidden)
        log_probs = _scaled(logits, temperature).log_softmax(-1)
        tokens = logits.argmax(-1) if mode == "eval" else _sample(log_probs, noise)
        record = {"tokens": tokens.to(torch.uint8), "temperature": temperature}
        return Act(self.centres[tokens], record, _pick(log_probs, tokens).float(), self.values(hidden))

    @in_precision
    def evaluate(self, inputs: Inputs, record: Record) -> Evaluation:
        """Score the recorded token ids; they are never derived from actions."""
        hidden = self._decode(inputs)
        log_probs = _scaled(self._logits(hidden), record["temperature"]).log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        return Evaluation(
            _pick(log_probs, record["tokens"].long()), entropies.mean((1, 2)), entropies, self.values(hidden)
        )

    @in_precision
    def sft_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor, noise: RowNoise) -> Tensor:
        """Cross-entropy against soft targets around the demonstrated action."""
        logits = self._logits(self._decode(inputs, noise))
        cross_entropy = -(self._targets(actions) * logits.log_softmax(-1)).sum(-1)  # (B, C, D)
        return masked_mean(cross_entropy, mask)

    @torch.no_grad()
    @in_precision
    def estimate(self, inputs: Inputs) -> Tensor:
        """As the base class says."""
        return self.require_values(self._decode(inputs))

    def _decode(self, inputs: Inputs, dropout: RowNoise | None = None) -> Tensor:
        """Hidden states of the queries: [B, C * D, W]."""
        prefix = self.prefix(inputs, dropout)
        tokens = torch.cat([prefix, self.queries.expand(len(prefix), -1, -1)], dim=1)
        *blocks, last = self.backbone.layers
        for block in blocks:
            tokens, _, _ = run_layer(block, tokens)
        hidden: Tensor = self.norm(run_layer(last, tokens, len(self.queries), part=last.last_tokens))
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, C, D, BINS], at least float32."""
        shape = (len(hidden), self.config.chunk, self.config.action_dim, BINS)
        return exact(self.head(hidden)).view(shape)

    def _targets(self, actions: Tensor) -> Tensor:
        """Target distribution over bins [B, C, D, BINS] of environment-unit actions: a Gaussian around the action.

        One-hot targets would teach that the neighbouring bin is as wrong as the farthest one, and leave a policy
        without spread, which RL cannot improve.
        """
        normalised = self.normaliser.action(actions).clamp(self.centres[0], self.centres[-1])
        distance = normalised.unsqueeze(-1) - self.centres
        if not self.config.token_spread:
            return F.one_hot(distance.abs().argmin(-1), BINS).to(distance.dtype)
        return (-0.5 * (distance / self.config.token_spread).square()).softmax(-1)


def masked_mean(per_dim: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid steps of each row: [B, C, D] and mask [B, C] to [B]; 0 where no step is valid."""
    valid = mask.to(per_dim.dtype)
    return (per_dim.mean(-1) * valid).sum(1) / valid.sum(1).clamp(min=1.0)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits / temperature.view(-1, 1, 1, 1)


def _pick(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _sample(log_probs: Tensor, noise: RowNoise) -> Tensor:
    """Inverse-CDF sampling: one uniform per token, whatever the batch."""
    below = log_probs.exp().cumsum(-1)
    draw = noise.uniform(*below.shape[1:3]).unsqueeze(-1)
    # Rounding can leave the last cumulative sum just under 1, hence the clamp.
    return torch.searchsorted(below, draw, right=True).squeeze(-1).clamp(max=BINS - 1)


def _smooth_init(head: nn.Linear, centres: Tensor) -> None:
    """Start from logits that are smooth over neighbouring bins, so that evidence for one bin also moves the next."""
    frequencies = torch.arange(1, 17) * (math.pi / 2)
    phases = (centres.unsqueeze(1) + 1.0) * frequencies  # (BINS, 16)
    waves = torch.cat([phases.sin(), phases.cos()], dim=1)
    mixing = torch.randn(waves.shape[1], head.in_features) / math.sqrt(waves.shape[1] * head.in_features)
    with torch.no_grad():
        head.weight.copy_(waves @ mixing)
        head.bias.zero_()
