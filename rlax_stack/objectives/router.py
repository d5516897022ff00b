"""What is summed over tokens about the router of a mixture of experts: its losses and its metrics.

Not for routing (models/experts.py). Invariant: sums over tokens add up over micro-batches, so losses and metrics depend
on the tokens of the batch alone, however they are packed.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlax_stack.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterLoss:
  """Coefficients of the router's losses; 0 leaves one out.

  aux_coef: of `load_balance`, which costs one more forward pass of the batch. z_coef: of the mean squared
  log-sum-exp of the router's logits ("ST-MoE", Zoph et al., https://arxiv.org/abs/2202.08906).
  """

  aux_coef: float = 0.0
  z_coef: float = 0.0

  def __post_init__(self):
    for name in ('aux_coef', 'z_coef'):
      value = getattr(self, name)
      if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f'router_{name} must be 0 or more, got {value!r}.')


NO_ROUTER_LOSS = RouterLoss()


class RouterSums(NamedTuple):
  """Sums over tokens, float32, with a leading axis of layers: E experts, each token weighing w."""

  load: jax.Array  # [L, E], Σ w · how often the token chose the expert (0 or 1); no gradient
  probability: jax.Array  # [L, E], Σ w · p of the softmax over all experts
  entropy: jax.Array  # [L], Σ w · −Σₑ p log p, in nats
  square: jax.Array  # [L], Σ w · (log Σₑ exp(logit))²
  strayed: jax.Array | None = (
    None  # [L], Σ w · choices that are not the likeliest; None where all are
  )


def router_sums(
  logits: jax.Array, experts: jax.Array, weight: jax.Array, *, replayed: bool = False
) -> RouterSums:
  """The sums of one layer, without the axis of layers.

  Args:
    logits: float32 [..., E].
    experts: int32 [..., k], chosen.
    weight: float32 [...], of each token; 0 for padding.
    replayed: whether experts may be others than the likeliest.
  """
  count = logits.shape[-1]
  log_probs = jax.nn.log_softmax(logits, axis=-1)
  probs = jnp.exp(log_probs)
  chosen = jnp.sum(jax.nn.one_hot(experts, count, dtype=jnp.float32), axis=-2)
  tokens = tuple(range(weight.ndim))
  # Padding runs through the model as tokens do; its numbers are finite.
  return RouterSums(
    load=jnp.sum(weight[..., None] * chosen, axis=tokens),
    probability=jnp.sum(weight[..., None] * probs, axis=tokens),
    entropy=jnp.sum(weight * -jnp.sum(probs * log_probs, axis=-1)),
    square=jnp.sum(weight * jnp.square(jax.nn.logsumexp(logits, axis=-1))),
    strayed=jnp.sum(weight * _strayed(logits, experts)) if replayed else None,
  )


def _strayed(logits: jax.Array, experts: jax.Array) -> jax.Array:
  """How many of each token's k experts are not its k likeliest, float32 [...]."""
  least = jax.lax.top_k(logits, experts.shape[-1])[0][..., -1:]
  chosen = jnp.take_along_axis(logits, experts, axis=-1)
  return jnp.sum((chosen < least).astype(jnp.float32), axis=-1)


def load_balance(load: jax.Array, probability: jax.Array, tokens: jax.Array) -> jax.Array:
  """Load-balancing loss, float32 scalar: k, the experts of a token, where all experts are alike.

  L = mean over layers of E Σₑ fₑ Pₑ,  fₑ = load / tokens,  Pₑ = probability / tokens

  Linear in `probability`: with the load of the whole batch, what parts of the batch give adds up.
  Divided by: the tokens of the whole batch. Gradient flows through: probability only.
  See "Switch Transformers", Fedus et al. (https://arxiv.org/abs/2101.03961), and Mixtral in transformers, which takes
  the tokens of all layers together.

  Args:
    load: [L, E], of the whole batch.
    probability: [L, E], of the batch or a part of it.
    tokens: float32 scalar, the weight of all tokens of the batch.
  """
  shares = jax.lax.stop_gradient(load) / tokens
  return load.shape[1] * jnp.mean(jnp.sum(shares * (probability / tokens), axis=1))


def router_loss(
  settings: RouterLoss, sums: RouterSums, load: jax.Array | None, tokens: jax.Array
) -> jax.Array:
  """The share of a micro-batch in the router's losses, coefficients included; float32 scalar.

  Args:
    settings: see RouterLoss.
    sums: of the micro-batch.
    load: [L, E], of the whole batch; read with aux_coef only.
    tokens: float32 scalar, of the whole batch.
  """
  loss = settings.z_coef * jnp.mean(sums.square) / tokens
  if load is None:
    return loss
  return loss + settings.aux_coef * load_balance(load, sums.probability, tokens)


def router_metrics(sums: RouterSums, tokens: jax.Array) -> dict[str, jax.Array]:
  """Float32 scalars of a whole batch.

  expert_load_max and expert_load_min: tokens of the busiest and of the idlest expert of any layer, divided by the mean
  over the experts; 1 is balance, a minimum of 0 an expert that no token chose. router_entropy: of the softmax over all
  experts, mean over tokens and layers, in nats. router_aux: `load_balance`. router_z: the mean squared log-sum-exp.
  router_strayed, with replay: share of the replayed choices that the router would not make itself.
  """
  relative = sums.load / jnp.mean(sums.load, axis=1, keepdims=True)
  strayed = {}
  if sums.strayed is not None:
    strayed = {'router_strayed': jnp.sum(sums.strayed) / jnp.sum(sums.load)}
  return strayed | {
    'expert_load_max': jnp.max(relative),
    'expert_load_min': jnp.min(relative),
    'router_entropy': jnp.mean(sums.entropy) / tokens,
    'router_aux': load_balance(sums.load, sums.probability, tokens),
    'router_z': jnp.mean(sums.square) / tokens,
  }
