"""Optimizers by name, with warm-up and decay, from optax.

Not for skipping non-finite steps (`train_step.py`). Invariant: the learning rate is a function of
the number of updates applied, so a skipped update does not move the schedule.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlax_stack.config import nearest
from rlax_stack.errors import ConfigError
from rlax_stack.learner import directions
from rlax_stack.learner.rounding import rounded_state

SCHEDULES = ('constant', 'linear', 'cosine')
DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
  """Tunables of the optimizers.

  name: one of OPTIMIZERS. learning_rate: the peak, reached after `warmup_steps` updates that rise
  linearly from 0 (the first update already has 1/warmup_steps of it). decay: one of SCHEDULES, from the
  peak to final_fraction times the peak at update `total_steps`; constant never falls. b1, b2: of
  Adam's moments, which muon uses for what is no matrix, and of lion; b1 is schedule_free's β. eps: of
  Adam. momentum: of muon and sgd. weight_decay is decoupled and spares norms, biases and
  magnitudes.
  max_grad_norm: the global norm above which the gradient is scaled down. state_dtype: of moments, in
  DTYPES; bfloat16 is rounded stochastically, by `seed`. gradient_dtype: of the sum of the micro-batches'
  gradients.
  """

  learning_rate: float
  name: str = 'adamw'
  warmup_steps: int = 0
  decay: str = 'constant'
  total_steps: int = 0
  final_fraction: float = 0.0
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  momentum: float = 0.95
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0
  state_dtype: str = 'float32'
  gradient_dtype: str = 'float32'
  seed: int = 0

  def __post_init__(self):
    if self.name not in OPTIMIZERS:
      raise ConfigError(f'unknown optimizer {self.name!r}.{nearest(self.name, OPTIMIZERS)}')
    for dtype in (self.state_dtype, self.gradient_dtype):
      if dtype not in DTYPES:
        raise ConfigError(f'unknown dtype {dtype!r} of an optimizer. Set it to one of {[*DTYPES]}.')
    if self.name == 'schedule_free' and (self.b1 <= 0 or self.decay != 'constant'):
      raise ConfigError(
        f'schedule_free needs b1 above 0 and decay=constant, got {self.b1} and {self.decay!r}: its '
        'average is in the place of a schedule.'
      )
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


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformationExtraArgs:
  """Clip by global norm, the optimizer's direction, decoupled weight decay, learning rate.

  Its state is `settings.state_dtype` where it mirrors parameters, the iterate of schedule_free excepted.
  """
  schedule, direction = learning_rate_schedule(settings), OPTIMIZERS[settings.name](settings)
  if settings.state_dtype == 'bfloat16':
    direction = rounded_state(direction, seed=settings.seed)
  parts = [direction]
  if settings.weight_decay:
    parts.append(optax.add_decayed_weights(settings.weight_decay, mask=decay_mask))
  parts.append(optax.scale_by_learning_rate(schedule))
  if settings.name == 'schedule_free':
    parts = [directions.schedule_free(optax.chain(*parts), schedule, beta=settings.b1)]
  clip = optax.clip_by_global_norm(settings.max_grad_norm)
  return optax.with_extra_args_support(optax.chain(clip, *parts))


def scaled_update(
  settings: OptimizerSettings, gradient: Any, opt_state: Any, params: Any, scale: Any = None
) -> tuple[Any, Any]:
  """What to add to the parameters, and the optimizer's new state.

  Args:
    settings: see OptimizerSettings.
    gradient: float32 tree of the parameters.
    opt_state: of `make_optimizer`.
    params: the parameters.
    scale: float32 scalar, factor of this step; None is 1.
  """
  transform, inside = make_optimizer(settings), settings.name == 'schedule_free'
  given = {'step_scale': scale} if inside and scale is not None else {}
  # optax mixes its int32 counters with float32, which strict promotion refuses.
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = transform.update(gradient, opt_state, params, **given)
  if scale is not None and not inside:
    updates = jax.tree.map(lambda x: scale * x, updates)
  return updates, opt_state


def _adam(settings: OptimizerSettings) -> optax.GradientTransformation:
  return optax.scale_by_adam(b1=settings.b1, b2=settings.b2, eps=settings.eps)


def _adafactor(settings: OptimizerSettings) -> optax.GradientTransformation:
  del settings
  return directions.adafactor()


def _lion(settings: OptimizerSettings) -> optax.GradientTransformation:
  return optax.scale_by_lion(b1=settings.b1, b2=settings.b2)


def _muon(settings: OptimizerSettings) -> optax.GradientTransformation:
  return directions.muon(momentum=settings.momentum, other=_adam(settings))


def _sgd(settings: OptimizerSettings) -> optax.GradientTransformation:
  return directions.sgd(momentum=settings.momentum)


def _schedule_free(settings: OptimizerSettings) -> optax.GradientTransformation:
  # Adam without its first moment, whose place the average takes.
  return optax.scale_by_rms(
    decay=settings.b2, eps=settings.eps, eps_in_sqrt=False, bias_correction=True
  )


OPTIMIZERS: dict[str, Callable[[OptimizerSettings], optax.GradientTransformation]] = {
  'adamw': _adam,
  'muon': _muon,
  'adafactor': _adafactor,
  'lion': _lion,
  'sgd': _sgd,
  'schedule_free': _schedule_free,
}
