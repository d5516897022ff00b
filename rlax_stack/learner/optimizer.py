"""AdamW with warm-up and decay, from optax.

Not for skipping non-finite steps (`train_step.py`). Invariant: the learning rate is a function of
the number of updates applied, so a skipped update does not move the schedule.
"""

import dataclasses
from typing import Any

import jax
import optax

from rlax_stack.errors import ConfigError

SCHEDULES = ('constant', 'linear', 'cosine')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
  """Tunables of AdamW.

  learning_rate: the peak, reached after `warmup_steps` updates that rise linearly from 0 (the first
  update already has 1/warmup_steps of it). decay: one of SCHEDULES, from the peak to final_fraction
  times the peak at update `total_steps`; constant never falls. weight_decay is decoupled and spares
  norms, biases and magnitudes.
  max_grad_norm: the global norm above which the gradient is scaled down.
  """

  learning_rate: float
  warmup_steps: int = 0
  decay: str = 'constant'
  total_steps: int = 0
  final_fraction: float = 0.0
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0

  def __post_init__(self):
    if self.decay not in SCHEDULES:
      raise ConfigError(f'unknown decay {self.decay!r}. Set it to one of {SCHEDULES}.')
    if self.learning_rate <= 0 or self.max_grad_norm <= 0:
      raise ConfigError(
        f'learning_rate and max_grad_norm must be > 0, got {self.learning_rate} and '
        f'{self.max_grad_norm}.'
      )
    if self.decay != 'constant' and self.total_steps <= self.warmup_steps:
      raise ConfigError(
        f'decay {self.decay!r} needs total_steps > warmup_steps, got {self.total_steps} and '
        f'{self.warmup_steps}.'
      )


def learning_rate_schedule(settings: OptimizerSettings) -> optax.Schedule:
  """Function from the number of updates applied so far to the learning rate of the next.

  Float32.
  """
  peak, warmup = settings.learning_rate, settings.warmup_steps
  steps = settings.total_steps - warmup
  if settings.decay == 'linear':
    decay = optax.linear_schedule(peak, peak * settings.final_fraction, steps)
  elif settings.decay == 'cosine':
    decay = optax.cosine_decay_schedule(peak, steps, alpha=settings.final_fraction)
  else:
    decay = optax.constant_schedule(peak)
  if not warmup:
    return decay
  # An update at rate 0 would be wasted, so warm-up starts one step in.
  rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
  return optax.join_schedules([rise, decay], [warmup])


def decay_mask(params: Any) -> Any:
  """Tree of bool: True where weight decay applies. Norm scales, biases and DoRA's magnitudes are spared."""

  def decays(path, leaf):
    del leaf
    return path[-1].key not in ('scale', 'bias', 'magnitude')

  return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
  """Clip by global norm, Adam moments (float32), decoupled weight decay, learning rate."""
  parts = [
    optax.clip_by_global_norm(settings.max_grad_norm),
    optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps),
  ]
  if settings.weight_decay:
    parts.append(optax.add_decayed_weights(settings.weight_decay, mask=decay_mask))
  parts.append(optax.scale_by_learning_rate(learning_rate_schedule(settings)))
  return optax.chain(*parts)
