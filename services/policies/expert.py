"""The action expert of `tiny-flow`: a narrow transformer over C noisy actions that reads the prefix through its cached
keys and values, layer by layer, and knows the flow time through adaptive RMS norms (as pi0.5, arXiv:2504.16054).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.policies.backbone import Layer, attend, run_layer, split_heads
from services.policies.config import PolicyConfig

Context = list[tuple[Tensor, Tensor]]
"""Keys and values [B, H, P, d] of the prefix, one pair per layer."""

_TIME_WIDTH = 64
_MODULATIONS = 6  # scale, shift and gate, for attention and for the MLP


class ExpertLayer(Layer):
    """One layer over [B, C, E]; `modulation` is [B or 1, 1, 6 E]."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * heads * head_dim)
        self.attention_out = nn.Linear(heads * head_dim, width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], modulation: Tensor) -> Tensor:
        """The actions after this layer; `context` is the keys and values of the backbone's layer."""
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = modulation.chunk(_MODULATIONS, dim=-1)
        query, key, value = split_heads(self.qkv(ada_rms(x, scale, shift)), 3, self.heads)
        key, value = torch.cat([context[0], key], dim=2), torch.cat([context[1], value], dim=2)
        x = x + gate * self.attention_out(attend(query, key, value))
        hidden: Tensor = self.mlp_out(F.silu(self.mlp_in(ada_rms(x, mlp_scale, mlp_shift))))
        return x + mlp_gate * hidden


class Expert(nn.Module):
    """Noisy actions [B, C, D] at time t to hidden states [B, C, E], from which velocity and noise level are read."""

    frequencies: Tensor

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        size = config.shape
        self.width, self.depth = size.expert, size.depth
        self.action_in = nn.Linear(config.action_dim, size.expert)
        self.position = nn.Parameter(0.02 * torch.randn(config.chunk, size.expert))
        self.time_in = nn.Linear(_TIME_WIDTH, size.expert)
        self.modulation = nn.Linear(size.expert, size.expert * (_MODULATIONS * size.depth + 2))
        self.layers = nn.ModuleList(
            ExpertLayer(size.expert, size.heads, size.width // size.heads) for _ in range(size.depth)
        )
        self.velocity_out = nn.Linear(size.expert, config.action_dim)
        # Periods from 4e-3 to 4, as pi0: they resolve the steps of any K in use.
        periods = 4e-3 * (4.0 / 4e-3) ** torch.linspace(0.0, 1.0, _TIME_WIDTH // 2)
        self.register_buffer("frequencies", 2.0 * math.pi / periods, persistent=False)
        self._init()

    def _init(self) -> None:
        """Nearly time-independent at first, with scales and gates of 1, and a velocity near zero."""
        with torch.no_grad():
            self.modulation.weight.mul_(0.1)
            bias = torch.zeros(_MODULATIONS * self.depth + 2, self.width)
            bias[0::3] = 1.0  # scales, the final one too
            bias[2::3] = 1.0  # gates
            self.modulation.bias.copy_(bias.flatten())
            self.velocity_out.weight.mul_(0.1)
            self.velocity_out.bias.zero_()

    @property
    def expert_layers(self) -> list[ExpertLayer]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, ExpertLayer)]

    def modulations(self, time: Tensor) -> Tensor:
        """Flow times [T] to modulations [T, 1, M] of all layers; one row serves a whole batch at the same time."""
        phases = time.to(self.frequencies.dtype).unsqueeze(-1) * self.frequencies
        waves = torch.cat([phases.sin(), phases.cos()], dim=-1).to(self.position.dtype)
        modulations: Tensor = self.modulation(F.silu(self.time_in(waves)))
        return modulations.unsqueeze(1)

    def forward(self, actions: Tensor, context: Context, modulations: Tensor) -> Tensor:
        """Hidden states [B, C, E] of noisy actions [B, C, D]; `modulations` as the method of that name gives them."""
        x = self.action_in(actions.to(self.position.dtype)) + self.position
        widths = [self.width * _MODULATIONS] * self.depth + [self.width] * 2
        *per_layer, scale, shift = modulations.split(widths, dim=-1)
        for layer, keys_values, modulation in zip(self.expert_layers, context, per_layer, strict=True):
            x = run_layer(layer, x, keys_values, modulation)
        return ada_rms(x, scale, shift)


def ada_rms(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """RMS norm whose scale and shift depend on the flow time. Few operations: `rms_norm` takes more on a CPU."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(shift, x, scale * (math.sqrt(x.shape[-1]) / (norm + 1e-6)))
