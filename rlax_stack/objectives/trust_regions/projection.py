"""TROLL: each token's distribution is projected into a KL ball around the proximal one.

Not for bounds of ratios (`clip.py`) or masks (`divergence.py`). Invariant: a token inside its ball
has the loss −ρA and nothing else; the distributions are cut to the proximal policy's most likely
words, the sampled one, and one entry for all others together, so that they still sum to 1.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.objectives import ratios
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs, TokenLoss
from rlax_stack.objectives.ratios import Ratio

_TINY = 1e-20  # keeps the logarithm of what the support leaves over finite
_HALVINGS = 40  # of the interval [0, 1] that the step is looked for in


def troll(
  ratio: Ratio,
  inputs: LossInputs,
  *,
  vocabulary: dict[str, jax.Array],
  delta: Annotated[float, Range(1e-6)] = 0.05,
  coef: Annotated[float, Range(0.0)] = 1.0,
) -> TokenLoss:
  """Surrogate of the projected policy, and a pull of the policy to its projection.

  Lₜ = −Âₜ π̃ₜ / π_proximal,ₜ + α KL(πₜ ‖ sg[π̃ₜ])
  π̃ₜ = argmin KL(π̃ ‖ πₜ) under KL(π̃ ‖ π_proximal,ₜ) ≤ δ;  log π̃ ∝ (log π + η log π_proximal) / (1 + η)

  η is 0 inside the ball, else the root of KL(π̃ ‖ π_proximal) = δ, looked for by bisection; its
  gradient is that of the implicit function. Over the K most likely words of π_proximal (as many as
  leave a mass of m over), the sampled word, and the rest as one word: the paper drops the rest.
  Where π is π_proximal, as at one update per batch, this is the loss −ρA. With more, K + 2 log-probs of
  every token are kept for the batch.
  Divided by: the aggregation's denominator. Gradient flows through: log_probs_t inside the ball; π at
  the words of the support outside of it, also where it moves η.
  See "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models", Becker et al.
  (https://arxiv.org/abs/2510.03817), with its values.

  Args:
    ratio: of tokens; its `pool` joins the projected log-ratios.
    inputs: [rows, N].
    vocabulary: from `likely_words` and `on_support`.
    delta: δ, a divergence in nats.
    coef: α.
    size: K.
    tail: m.
  """
  new, old = vocabulary['new'], vocabulary['old']
  used = jnp.concatenate(
    [vocabulary['ids'] >= 0, jnp.ones((*inputs.mask_t.shape, 1), bool)], axis=-1
  )
  found = project(new, old, used, delta)
  place = vocabulary['place'][..., None]
  moved = jnp.take_along_axis(found.log_probs - old, place, axis=-1)[..., 0]
  outside = inputs.mask_t & found.outside
  log_ratio = ratio.pool(jnp.where(outside, moved, ratio.log_token_t))
  held = jax.lax.stop_gradient(found.log_probs)
  pull = _divergence(new, held, used)
  loss = -inputs.adv_t * ratios.exp(log_ratio) + coef * jnp.where(outside, pull, 0.0)
  nowhere = jnp.zeros_like(inputs.mask_t)
  return TokenLoss(
    loss, nowhere, nowhere, {'projected_fraction': outside, 'kl_proximal': found.divergence}
  )


class Projection(NamedTuple):
  """What `project` gives: `outside` and `divergence` have one value per distribution."""

  log_probs: jax.Array  # of the projected distribution; the new one where it is inside
  outside: jax.Array  # bool
  divergence: jax.Array  # KL(new ‖ old), before


def project(new: jax.Array, old: jax.Array, used: jax.Array, delta: float) -> Projection:
  """The distribution nearest to `new` whose divergence from `old` is at most `delta`.

  With t = 1 / (1 + η) it is ∝ old^(1−t) new^t, and its divergence grows with t from 0 at 0.

  Args:
    new: log-probs, float32 [..., S].
    old: log-probs, [..., S]; held.
    used: bool [..., S]; entries that are not used have no probability.
    delta: nats.
  """
  old = jax.lax.stop_gradient(old)
  gap = jnp.where(used, new - old, 0.0)
  fixed = jax.lax.stop_gradient(gap)
  divergence = _divergence(new, old, used)
  outside = jax.lax.stop_gradient(divergence) > delta

  def halve(_, bounds):
    low, high = bounds
    middle = 0.5 * (low + high)
    far = _divergence(_mixed(old, fixed, middle, used), old, used) > delta
    return jnp.where(far, low, middle), jnp.where(far, middle, high)

  start = jnp.zeros(outside.shape, jnp.float32)
  step, _ = jax.lax.fori_loop(0, _HALVINGS, halve, (start, start + 1.0))
  step = jnp.where(outside, step, 1.0)
  # d KL / d t = t Var(log new/old), under the projected distribution: what a change of `new` does to
  # the divergence at a fixed step, the step undoes.
  found = jax.lax.stop_gradient(_mixed(old, fixed, step, used))
  weight = jnp.where(used, jnp.exp(found), 0.0)
  mean = jnp.sum(weight * fixed, axis=-1, keepdims=True)
  slope = step * jnp.sum(weight * (fixed - mean) ** 2, axis=-1)
  drift = _divergence(_mixed(old, gap, step, used), old, used)
  drift = drift - jax.lax.stop_gradient(drift)
  step = step - drift / jnp.where(outside, jnp.maximum(slope, _TINY), 1.0)
  projected = _mixed(old, gap, step, used)
  return Projection(jnp.where(outside[..., None], projected, new), outside, divergence)


def _mixed(old: jax.Array, gap: jax.Array, step: jax.Array, used: jax.Array) -> jax.Array:
  """Log-probs ∝ old + step · gap over the entries used; 0 elsewhere."""
  mixed = jnp.where(used, old + step[..., None] * gap, 0.0)
  total = jax.nn.logsumexp(mixed, axis=-1, keepdims=True, where=used)
  return jnp.where(used, mixed - total, 0.0)


def _divergence(first: jax.Array, second: jax.Array, used: jax.Array) -> jax.Array:
  """KL(first ‖ second) of log-probs over the entries used."""
  return jnp.sum(jnp.where(used, jnp.exp(first) * (first - second), 0.0), axis=-1)


def likely_words(
  log_policy: jax.Array,
  target: jax.Array,
  *,
  size: Annotated[int, Range(1)] = 64,
  tail: Annotated[float, Range(0.0, 1.0)] = 1e-5,
) -> dict[str, jax.Array]:
  """The support that `troll` compares distributions on, and the proximal policy's log-probs there.

  Args:
    log_policy: [n, V], of the proximal policy.
    target: int32 [n].
    size: K.
    tail: m, the mass that may be left over.

  Returns: 'ids' int32 [n, K + 1], the last one the target if it is not among the others, −1 where there
    is none; 'place' int32 [n], where the target is; 'old' float32 [n, K + 2], the last entry the rest.
  """
  top, ids = jax.lax.top_k(log_policy, min(size, log_policy.shape[-1]))
  probability = jnp.exp(top)
  needed = jnp.cumsum(probability, axis=-1) - probability < 1.0 - tail
  ids = jnp.where(needed, ids, -1)
  among = jnp.any(ids == target[:, None], axis=-1)
  ids = jnp.concatenate([ids, jnp.where(among, -1, target)[:, None]], axis=-1)
  place = jnp.argmax(ids == target[:, None], axis=-1).astype(jnp.int32)
  return {'ids': ids, 'place': place, 'old': _at(log_policy, ids)}


def on_support(
  log_policy: jax.Array, target: jax.Array, *, proximal: dict[str, jax.Array]
) -> dict[str, jax.Array]:
  """The current policy's log-probs on the support of `likely_words`: 'new' float32 [n, K + 2].

  Args:
    log_policy: [n, V].
    target: not read.
    proximal: from `likely_words`.
  """
  del target
  return {'new': _at(log_policy, proximal['ids'])}


def _at(log_policy: jax.Array, ids: jax.Array) -> jax.Array:
  """Log-probs at `ids` (0 where −1), and of all other words together."""
  chosen = jnp.take_along_axis(log_policy, jnp.maximum(ids, 0), axis=-1)
  words, rows = log_policy.shape[-1], jnp.arange(ids.shape[0])[:, None]
  inside = jnp.zeros(log_policy.shape, bool)
  inside = inside.at[rows, jnp.where(ids < 0, words, ids)].set(True, mode='drop')
  rest = jnp.sum(jnp.where(inside, 0.0, jnp.exp(log_policy)), axis=-1, keepdims=True)
  return jnp.concatenate([jnp.where(ids < 0, 0.0, chosen), jnp.log(rest + _TINY)], axis=-1)


TABLE = {
  'troll': Box(
    troll,
    formula='−π̃/π_proximal·A + {coef:g}·KL(π‖sg π̃), KL(π̃‖π_proximal) ≤ {delta:g} over {size} words',
    vocabulary=on_support,
    proximal_vocabulary=likely_words,
  )
}
