"""`tiny-flow`: a flow-matching action head with likelihoods for RL, by Flow-SDE or Flow-Noise (piRL, arXiv:2510.25889).

Convention (pi0, openpi): t = 1 is noise, t = 0 is data, x_t = t * e + (1 - t) * a, velocity v = e - a.
K steps of length d = 1 / K start at t_k = 1 - k / K.
"""

import math

import torch
from torch import Tensor, nn

from services.common.errors import ConfigError
from services.policies.backbone import Layer, run_layer
from services.policies.base import Act, Evaluation, Inputs, Mode, Record
from services.policies.config import PolicyConfig
from services.policies.expert import Context, Expert
from services.policies.noise import RowNoise
from services.policies.oft import masked_mean
from services.policies.tiny import TinyPolicy, exact, in_precision

NOISE_STD = (0.08, 0.16)
"""Range of Flow-Noise's learned standard deviation, in normalised action units."""
_LOG_2PI = math.log(2.0 * math.pi)
_SFT_DRAWS = 4  # noise draws per imitation row: they share the prefix, which costs most of a pass


class TinyFlow(TinyPolicy):
    """Record of "sde": `before`, `after` float32 [C, D] around the one stochastic step, its index `step` uint8 [], and
    the effective `steps` uint8 [] and `noise_level` float32 []. Record of "noise": `chain` float32 [K + 1, C, D].
    Record of "fpo": `action` float32 [C, D], and `time` float32 [S] and `noise` float32 [S, C, D] of its loss.

    Later actions of a chunk influence earlier ones while denoising, so an executed chunk is scored whole.
    """

    mask_unexecuted = False

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.expert = Expert(config)
        if config.flow_method == "noise":
            width = config.shape.expert
            self.noise = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, config.action_dim))

    @staticmethod
    def record_schema(config: PolicyConfig) -> dict[str, tuple[tuple[int, ...], str]]:
        """As the class says."""
        action = (config.chunk, config.action_dim)
        if config.flow_method == "noise":
            return {"chain": ((config.denoising_steps + 1, *action), "float32")}
        if config.flow_method == "fpo":
            draws = (config.flow_samples,)
            return {"action": (action, "float32"), "time": (draws, "float32"), "noise": ((*draws, *action), "float32")}
        scalars = {"step": "uint8", "steps": "uint8", "noise_level": "float32"}
        return {"before": (action, "float32"), "after": (action, "float32")} | {n: ((), t) for n, t in scalars.items()}

    @staticmethod
    def entropy_depends_on_weights(config: PolicyConfig) -> bool:
        """Only Flow-Noise learns its spread."""
        return config.flow_method == "noise"

    @property
    def layers(self) -> list[Layer]:
        """The backbone's and the expert's."""
        return [*super().layers, *self.expert.expert_layers]

    @torch.no_grad()
    @in_precision
    def act(self, inputs: Inputs, mode: Mode, noise: RowNoise) -> Act:
        """Denoise a chunk: stochastically (train), or by the ODE from random noise with log-probability 0 (eval)."""
        context, value = self._read(inputs)
        x = noise.normal(self.config.chunk, self.config.action_dim)
        if mode == "eval":
            return self._act_ode(x, context, value)
        methods = {"sde": self._act_sde, "noise": self._act_noise, "fpo": self._act_fpo}
        return methods[self.config.flow_method](x, context, value, noise)

    @torch.no_grad()
    @in_precision
    def estimate(self, inputs: Inputs) -> Tensor:
        """As the base class says."""
        _, value = self._read(inputs)
        if value is None:
            raise ConfigError(f"this {self.spec.family} has no value head; set policy.value_head = true")
        return value

    @in_precision
    def evaluate(self, inputs: Inputs, record: Record) -> Evaluation:
        """Score the recorded denoising steps."""
        context, value = self._read(inputs)
        methods = {"sde": self._score_step, "noise": self._score_chain, "fpo": self._score_fpo}
        log_prob, entropies = methods[self.config.flow_method](record, context)
        return Evaluation(log_prob, entropies.mean((1, 2)), entropies, value)

    @in_precision
    def sft_loss(self, inputs: Inputs, actions: Tensor, mask: Tensor, noise: RowNoise) -> Tensor:
        """Flow-matching loss: squared error of the velocity at random times."""
        context, _ = self._read(inputs, noise)
        context = [(_repeat(key), _repeat(value)) for key, value in context]
        data = _repeat(self.normaliser.action(actions))
        time = _flow_times(noise, _SFT_DRAWS).flatten()
        epsilon = noise.normal(_SFT_DRAWS, *actions.shape[1:]).flatten(0, 1)
        at = time.view(-1, 1, 1)
        velocity = self._velocity(at * epsilon + (1.0 - at) * data, context, self.expert.modulations(time))
        loss = masked_mean((velocity - (epsilon - data)).square(), _repeat(mask))
        return loss.view(-1, _SFT_DRAWS).mean(1)

    # Acting ---------------------------------------------------------------------------------------------------------

    def _act_ode(self, x: Tensor, context: Context, value: Tensor | None) -> Act:
        """Deterministic integration; the log-probability is zero by definition."""
        end = self._integrate(x, context)
        return Act(end, self._ode_record(x, end), torch.zeros_like(end), value)

    def _integrate(self, x: Tensor, context: Context) -> Tensor:
        """From noise to actions by the ODE."""
        for modulation in self._schedule(x):
            x = x - self._velocity(x, context, modulation) / self.config.denoising_steps
        return x

    def _act_fpo(self, x: Tensor, context: Context, value: Tensor | None, noise: RowNoise) -> Act:
        """The ODE from random noise; the loss of its end is recorded by the draws that it was taken at."""
        action, draws = self._integrate(x, context), self.config.flow_samples
        record = {"action": action, "time": _flow_times(noise, draws), "noise": noise.normal(draws, *x.shape[1:])}
        return Act(action, record, self._score_fpo(record, context)[0], value)

    def _act_sde(self, x: Tensor, context: Context, value: Tensor | None, noise: RowNoise) -> Act:
        """All steps follow the ODE, except one, drawn per row, that follows the SDE."""
        steps = self.config.denoising_steps
        chosen, z = noise.integers(steps), noise.normal(*x.shape[1:])
        settings = self._settings(x)
        states, velocities = [x], []
        keep, flow, spread = self._step_coefficients(chosen)  # each (K, B, 1, 1)
        for k, modulation in enumerate(self._schedule(x)):
            velocity = self._velocity(x, context, modulation)
            x = keep[k] * x + flow[k] * velocity + spread[k] * z
            velocities.append(velocity)
            states.append(x)
        rows = torch.arange(len(x), device=x.device)
        before, after = torch.stack(states[:-1])[chosen, rows], torch.stack(states[1:])[chosen, rows]
        velocity = torch.stack(velocities)[chosen, rows]
        # Scored as `evaluate` does, from the recorded values: the log-probabilities then agree to the last bit or two.
        mean, std = sde_step(before, velocity, chosen, settings["steps"].long(), settings["noise_level"])
        record = {"before": before, "after": after, "step": chosen.to(torch.uint8)} | settings
        return Act(x, record, gaussian_log_prob(after, mean, std), value)

    def _step_coefficients(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per step and row, the factors of x, velocity and noise: the SDE's for the chosen step, else the ODE's."""
        steps = self.config.denoising_steps
        index = torch.arange(steps, device=chosen.device)
        decay, std = sde_coefficients(index, torch.full_like(index, steps), self.config.noise_level)
        remaining = index.float() / steps  # 1 - t
        here = index.unsqueeze(1) == chosen  # (K, B)
        decay = here * decay.unsqueeze(1)
        keep, flow, spread = 1.0 - decay, -1.0 / steps - decay * remaining.unsqueeze(1), here * std.unsqueeze(1)
        return keep[..., None, None], flow[..., None, None], spread[..., None, None]

    def _act_noise(self, x: Tensor, context: Context, value: Tensor | None, noise: RowNoise) -> Act:
        """Every step adds noise of a learned level; the whole chain is recorded."""
        steps, chain = self.config.denoising_steps, [x]
        log_prob = gaussian_log_prob(x, torch.zeros_like(x), torch.ones_like(x))
        for modulation in self._schedule(x):
            velocity, std = self._velocity_and_std(x, context, modulation)
            mean = x - velocity / steps
            x = mean + std * noise.normal(*x.shape[1:])
            log_prob = log_prob + gaussian_log_prob(x, mean, std)
            chain.append(x)
        return Act(x, {"chain": torch.stack(chain, dim=1)}, self._reduce(log_prob, steps), value)

    def _schedule(self, x: Tensor) -> tuple[Tensor, ...]:
        """Modulations [1, 1, M] of the K steps: all rows share the times, so they are computed once."""
        steps = self.config.denoising_steps
        times = 1.0 - torch.arange(steps, device=x.device) / steps
        modulations = self.expert.modulations(times)
        return tuple(modulations[k : k + 1] for k in range(steps))

    # Scoring --------------------------------------------------------------------------------------------------------

    def _score_step(self, record: Record, context: Context) -> tuple[Tensor, Tensor]:
        step, steps = record["step"].long(), record["steps"].long()
        time = 1.0 - step.float() / steps.float()
        velocity = self._velocity(record["before"], context, self.expert.modulations(time))
        mean, std = sde_step(record["before"], velocity, step, steps, record["noise_level"])
        return gaussian_log_prob(record["after"], mean, std), gaussian_entropy(std).expand_as(mean)

    def _score_chain(self, record: Record, context: Context) -> tuple[Tensor, Tensor]:
        """All K steps in one pass of the expert, with the batch repeated K times."""
        chain = record["chain"]
        batch, steps = len(chain), chain.shape[1] - 1
        before, after = chain[:, :-1].flatten(0, 1), chain[:, 1:].flatten(0, 1)
        time = (1.0 - torch.arange(steps, device=chain.device) / steps).repeat(batch)
        repeated = [(_repeat(key, steps), _repeat(value, steps)) for key, value in context]
        velocity, std = self._velocity_and_std(before, repeated, self.expert.modulations(time))
        terms = gaussian_log_prob(after, before - velocity / steps, std).unflatten(0, (batch, steps))
        first = chain[:, 0]
        log_prob = gaussian_log_prob(first, torch.zeros_like(first), torch.ones_like(first)) + terms.sum(1)
        entropies = gaussian_entropy(std).unflatten(0, (batch, steps)).mean(1)
        return self._reduce(log_prob, steps), entropies

    def _score_fpo(self, record: Record, context: Context) -> tuple[Tensor, Tensor]:
        """Minus the flow-matching loss at the recorded draws (FPO, McAllister et al. 2025, equation 11).

        loss = mean over draws, actions and dimensions of |v(x_t, t) - (e - a)|^2, so that the sum over a chunk of
        what is returned is -loss, and the ratio of two policies exp(loss_old - loss_new). No likelihood, no entropy.
        """
        time, noise, action = record["time"], record["noise"], record["action"].unsqueeze(1)
        draws, at = time.shape[1], time[..., None, None]
        noisy = (at * noise + (1.0 - at) * action).flatten(0, 1)
        repeated = [(_repeat(key, draws), _repeat(value, draws)) for key, value in context]
        velocity = self._velocity(noisy, repeated, self.expert.modulations(time.flatten()))
        error = (velocity.unflatten(0, (-1, draws)) - (noise - action)).square().mean(1)
        return -error / (error.shape[1] * error.shape[2]), torch.zeros_like(error)

    def _reduce(self, log_prob: Tensor, steps: int) -> Tensor:
        """The chain's K + 1 terms, summed so far, as their mean if so configured: it keeps ratios within the clip."""
        return log_prob / (steps + 1) if self.config.noise_reduction == "mean" else log_prob

    # Network --------------------------------------------------------------------------------------------------------

    def _read(self, inputs: Inputs, dropout: RowNoise | None = None) -> tuple[Context, Tensor | None]:
        """Keys and values of every layer for the expert, and the value estimate."""
        tokens, context = self.prefix(inputs, dropout), []
        *blocks, last = self.backbone.layers
        for block in blocks:
            tokens, key, value = run_layer(block, tokens)
            context.append((key, value))
        context.append(last.context(tokens))
        # The last block's own tokens have no reader but the value head, which does with those of the block before.
        return context, self.values(tokens)

    def _velocity(self, x: Tensor, context: Context, modulations: Tensor) -> Tensor:
        return exact(self.expert.velocity_out(self.expert(x, context, modulations)))

    def _velocity_and_std(self, x: Tensor, context: Context, modulations: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.expert(x, context, modulations)
        low, high = (2.0 * math.log(std) for std in NOISE_STD)
        log_variance = low + (high - low) * (torch.tanh(exact(self.noise(hidden))) + 1.0) / 2.0
        return exact(self.expert.velocity_out(hidden)), (0.5 * log_variance).exp()

    def _settings(self, x: Tensor) -> Record:
        """The sampling parameters in effect, per row: scoring uses these, whatever the scorer is configured with."""
        level = x.new_full((len(x),), self.config.noise_level, dtype=torch.float32)
        steps = torch.full((len(x),), self.config.denoising_steps, dtype=torch.uint8, device=x.device)
        return {"steps": steps, "noise_level": level}

    def _ode_record(self, start: Tensor, end: Tensor) -> Record:
        """A record of the usual shape, so that evaluation episodes can be stored; it is never trained on."""
        if self.config.flow_method == "noise":
            return {"chain": torch.stack([start, *[end] * self.config.denoising_steps], dim=1)}
        if self.config.flow_method == "fpo":
            draws = self.config.flow_samples
            noise = start.unsqueeze(1).expand(-1, draws, -1, -1)
            return {"action": end, "time": start.new_ones(len(start), draws), "noise": noise}
        step = torch.zeros(len(start), dtype=torch.uint8, device=start.device)
        return {"before": start, "after": end, "step": step} | self._settings(start)


def sde_coefficients(step: Tensor, steps: Tensor, level: Tensor | float) -> tuple[Tensor, Tensor]:
    """Decay d * sigma^2 / (2 t) and standard deviation sigma * sqrt(d) of Flow-SDE steps, float32 like `step`.

    sigma_t = a * sqrt(t / (1 - t)); at t = 1 the denominator takes the time of the next step, or it would vanish.
    """
    delta = 1.0 / steps.float()
    time = 1.0 - step.float() * delta
    variance = level**2 * time / torch.where(step == 0, delta, 1.0 - time)
    return delta * variance / (2.0 * time), (delta * variance).sqrt()


def sde_step(x: Tensor, velocity: Tensor, step: Tensor, steps: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [B, C, D] and standard deviation [B, 1, 1] of one Flow-SDE step (Flow-GRPO, arXiv:2505.05470, eq. 9).

    mean = x - d v - decay * (x + (1 - t) v). step, steps: int64 [B], k and K. level: float32 [B], a.
    """
    decay, std = (value.view(-1, 1, 1) for value in sde_coefficients(step, steps, level))
    delta = (1.0 / steps.float()).view(-1, 1, 1)
    remaining = step.float().view(-1, 1, 1) * delta  # 1 - t
    return x - delta * velocity - decay * (x + remaining * velocity), std


def gaussian_log_prob(value: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian, per dimension."""
    return -0.5 * ((value - mean) / std).square() - std.log() - 0.5 * _LOG_2PI


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy in nats, per dimension."""
    return std.log() + 0.5 * (1.0 + _LOG_2PI)


def _flow_times(noise: RowNoise, draws: int) -> Tensor:
    """Flow times [B, draws] ~ Beta(1.5, 1) by its inverse CDF: more on the noisy end, where the observation decides."""
    return 0.001 + 0.999 * noise.uniform(draws) ** (1.0 / 1.5)


def _repeat(tensor: Tensor, times: int = _SFT_DRAWS) -> Tensor:
    return tensor.repeat_interleave(times, dim=0)
