"""The best of k samples where the samples are another policy's: weights of sets by their ratios.

The on-policy forms are in `best_of_k.py` and `shaping/best_of_k.py`. Invariant: with all ratios 1 the
rewards are those of `max_at_k_reward`; a group whose rewards are all equal gets exactly 0.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.objectives import ratios, segments
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs
from rlax_stack.objectives.reward_batch import RewardBatch, by_member
from rlax_stack.objectives.shaping.best_of_k import max_at_k_reward

_EPS = 1e-6
_ROUNDING = 1e-5  # of sums in float32


def off_policy_max_at_k(batch: RewardBatch, *, k: Annotated[int, Range(2)] = 2) -> np.ndarray:
  """Reward of the best of k samples, each set weighed by the ratios of its members to first order.

  Aᵢ = (R̃ᵢ − μ_g) / (s_g + 1e-6),  R̃ᵢ = Σ_{I ∋ i, |I| = k} (1 + Σ_{j ∈ I} δⱼ) max_{j ∈ I} Rⱼ / C(G − 1, k − 1)
  δⱼ = clip(Πₜ πₜ / π_behaviour,ₜ − 1, −c, c) of answer j

  The ratio of the answer itself is in R̃, so the surrogate should read none (`reinforce`), and no
  correction should weigh it again. Here, on the host, all δ are 0; the learner takes them from the
  current weights (`reweighed`), of the answers that are trained on.
  Divided by: the number of sets, then the standard deviation of the group (ddof 1). Gradient flows
  through: nothing.
  See "The Best of N Worlds", Bagirov et al. (https://arxiv.org/abs/2510.23393), section 3.3 and listing 3;
  the normalisation is that of its on-policy baseline. It gives no value of c: the default is ours.

  Args:
    batch: ragged groups of at least 2.
    k: samples of which the best counts; a smaller group takes its size.
    delta: c, the largest distance of a ratio from 1 that is believed.

  Returns: float64 [B].
  """
  best = max_at_k_reward(batch, k=k).reward

  def estimate(member: np.ndarray) -> np.ndarray:
    values = best[member]
    return (values - values.mean()) / (values.std(ddof=1) + _EPS)

  return by_member(batch, estimate)


class _Answers(NamedTuple):
  """Every token slot of a batch, sorted so that the answers of a group stand together by reward."""

  order: jax.Array  # int32, slot in the batch
  valid: jax.Array  # bool, the first token of an answer
  first: jax.Array  # int32, where the group begins
  rank: jax.Array  # float32, from 0 within the group
  size: jax.Array  # float32, answers of the group


def reweighed(
  inputs: LossInputs,
  *,
  k: Annotated[int, Range(2)] = 2,
  delta: Annotated[float, Range(0.0)] = 0.2,
) -> jax.Array:
  """Advantages of `off_policy_max_at_k` under the current weights, the same at all tokens of an answer.

  Args:
    inputs: [M, rows, N].
    k: see `off_policy_max_at_k`.
    delta: c.
  """
  mask = inputs.mask_t
  current = jax.lax.stop_gradient(inputs.log_probs_t)
  log_ratio = ratios.log_ratio(current, inputs.behaviour_log_probs_t, mask)
  ratio = ratios.exp(segments.run_sum(log_ratio, mask, inputs.trajectory_t))
  gap = jnp.clip(ratio - 1.0, -delta, delta)
  start = segments.run_start(mask, inputs.trajectory_t)
  value = jnp.where(start, _best_of_sets(inputs, start, gap, k), 0.0)

  def over_group(x):
    return segments.batch_sum(jnp.where(start, x, 0.0), mask, inputs.group_t)

  size = jnp.maximum(over_group(jnp.ones_like(value)), 1.0)
  mean = over_group(value) / size
  centred = jnp.where(start, value - mean, 0.0)
  spread = jnp.sqrt(over_group(centred * centred) / jnp.maximum(size - 1.0, 1.0))
  # Equal rewards, and sets that are the whole group, say nothing; rounding must not say anything.
  unequal = over_group(jnp.abs(inputs.reward_t - over_group(inputs.reward_t) / size)) > _EPS
  mixed = start & unequal & (spread > _ROUNDING * jnp.abs(mean))
  adv = jnp.where(mixed, centred / (spread + _EPS), 0.0)
  return segments.run_sum(adv, mask, inputs.trajectory_t)


def _best_of_sets(inputs: LossInputs, start: jax.Array, gap: jax.Array, k: int) -> jax.Array:
  """R̃ at the first token of every answer."""
  answers = _sorted(inputs, start)
  reward = jnp.where(answers.valid, inputs.reward_t.reshape(-1)[answers.order], 0.0)
  gap = jnp.where(answers.valid, gap.reshape(-1)[answers.order], 0.0)
  below = _prefix(gap, answers.first) - gap
  # Sets that a set of i and j, or of j alone, the best of them, is completed to.
  alone, pair, triple = (_share(answers, k, less) for less in (1, 2, 3))
  own = reward * (alone * (1.0 + gap) + pair * below)
  above, with_own = reward * (pair * (1.0 + gap) + triple * below), reward * (pair - triple)
  value = own + _suffix(above, answers) + gap * _suffix(with_own, answers)
  flat = jnp.zeros(value.size, jnp.float32).at[answers.order].set(value)
  return flat.reshape(inputs.mask_t.shape)


def _sorted(inputs: LossInputs, start: jax.Array) -> _Answers:
  last = jnp.iinfo(jnp.int32).max
  group = jnp.where(start, inputs.group_t, last).reshape(-1)
  order = jnp.lexsort((inputs.trajectory_t.reshape(-1), inputs.reward_t.reshape(-1), group))
  group = group[order]
  places = jnp.arange(group.size, dtype=jnp.int32)
  new = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])
  first = jax.lax.cummax(jnp.where(new, places, 0))
  run = jnp.cumsum(new.astype(jnp.int32)) - 1
  size = jax.ops.segment_sum(jnp.ones(group.size, jnp.float32), run, num_segments=group.size)[run]
  return _Answers(order, group != last, first, (places - first).astype(jnp.float32), size)


def _share(answers: _Answers, k: int, less: int) -> jax.Array:
  """C(j − less, k − less) / C(G − 1, k − 1), j the rank from 1 and k at most G; 0 where it has no sense."""
  top, size = answers.rank + 1.0 - less, answers.size
  chosen = jnp.minimum(float(k), size)
  out = jnp.ones_like(top)
  for m in range(k - 1):
    # Factors of the two binomials in turn, so that nothing overflows on the way.
    over = jnp.maximum(top - m, 0.0) / jnp.maximum(chosen - less - m, 1.0)
    under = (size - 1.0 - m) / jnp.maximum(chosen - 1.0 - m, 1.0)
    out = out * jnp.where(m < chosen - less, over, 1.0)
    out = out / jnp.where(m < chosen - 1.0, under, 1.0)
  return jnp.where((chosen >= less) & (top >= chosen - less) & answers.valid, out, 0.0)


def _prefix(value: jax.Array, first: jax.Array) -> jax.Array:
  """Sums of the group from its first answer to this one."""
  total = jnp.cumsum(value)
  return total - (total[first] - value[first])


def _suffix(value: jax.Array, answers: _Answers) -> jax.Array:
  """Sums over the answers of the group that rank above this one."""
  last = answers.first + answers.size.astype(jnp.int32) - 1
  through = _prefix(value, answers.first)
  return through[last] - through


TABLE = {
  'off_policy_max_at_k': Box(
    off_policy_max_at_k,
    formula='A = (R̃ − μ_g)/s_g, R̃ = E[(1 + Σδ)·max of {k} with it], |δ| ≤ {delta:g}',
    tags=frozenset({'group', 'behaviour'}),
    token_advantages=reweighed,
  )
}
