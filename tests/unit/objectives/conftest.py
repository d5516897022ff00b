"""Batches for the objectives' tests, and the loss of a whole batch from its micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.objectives import loss
from rlax_stack.objectives.inputs import LossInputs, added, clean
from rlax_stack.objectives.process_rewards import Steps
from rlax_stack.objectives.reward_batch import RewardBatch
from rlax_stack.objectives.vocabulary import current_terms, merged, proximal_terms
from rlax_stack.types import FinishReason, Reward, Trajectory


def _whole_loss(objective, inputs, state=None):
  state = objective.init_state() if state is None else state
  # Some size for the gradient of each trajectory, known by its index.
  norms = 1.0 + (clean(inputs).trajectory_t % 3).astype(jnp.float32)
  prepared = loss.prepare(objective, inputs, state, norms)
  total = None
  for index in range(inputs.mask_t.shape[0]):
    tokens, rows = jax.tree.map(lambda x, i=index: x[i], (prepared.tokens, inputs))
    part = loss.policy_loss(objective, rows, prepared._replace(tokens=tokens), state)
    total = part if total is None else added(total, part)
  return total


def _inputs(seed=0, masked=0.0, drift=0.15, rows=2):
  """[2, rows, 9]: two trajectories to a row, groups of two, holes in the mask, padding."""
  rng, shape = np.random.default_rng(seed), (2, rows, 9)
  place = np.arange(9)
  trajectory = np.arange(2 * rows).reshape(2, rows, 1) * 2 + (place >= 4)
  mask = np.broadcast_to(place < 7, shape) & (rng.random(shape) < 0.85) | (place % 4 == 0)
  mask = mask & (place < 8)
  behaviour = -0.1 - rng.exponential(1.0, shape)
  proximal = np.minimum(behaviour + drift * rng.standard_normal(shape), -0.02)
  current = np.minimum(proximal + drift * rng.standard_normal(shape), -0.01)
  reward = rng.random(4 * rows)
  # Draws of their own: half of the trajectories end, half are cut off.
  own = np.random.default_rng((seed, 1))
  value, after = (
    own.standard_normal(shape),
    own.standard_normal(4 * rows) * np.array([0, 1] * 2 * rows),
  )

  def filled(value):
    return jnp.asarray(np.where(mask, value, masked), jnp.float32)

  def ids(value):
    return jnp.asarray(np.where(mask, value, -1), jnp.int32)

  return LossInputs(
    log_probs_t=filled(current),
    entropy_t=filled(rng.random(shape) + 0.1),
    proximal_log_probs_t=filled(proximal),
    behaviour_log_probs_t=filled(behaviour),
    anchor_log_probs_t=filled(behaviour + 0.1),
    adv_t=filled((rng.standard_normal(4 * rows))[trajectory]),
    reward_t=filled(reward[trajectory]),
    mask_t=jnp.asarray(mask),
    weight_t=filled(0.0),
    trajectory_t=ids(trajectory),
    group_t=ids(trajectory // 2),
    turn_t=ids(place % 4 >= 2),
    version_t=ids(3 - trajectory % 2),
    staleness_t=ids(trajectory % 2),
    value_t=filled(value),
    next_value_t=filled(_next_values(value, mask, trajectory, after)),
    teacher_log_probs_t=filled(behaviour - 0.2 * value),
  )


def _next_values(value, mask, trajectory, after):
  """The value of the trajectory's next trained token; `after[i]` at its last one."""
  out = np.zeros(value.shape)
  for index in range(len(after)):
    places = np.argwhere(mask & (trajectory == index))
    for here, following in zip(places, [*places[1:], None], strict=True):
      out[tuple(here)] = after[index] if following is None else value[tuple(following)]
  return out


def _with_vocabulary(objective, inputs, masked=0.0, words=6):
  """The inputs with what the boxes' hooks make of random distributions; `masked` as in `_inputs`."""
  rng, mask = np.random.default_rng(5), np.asarray(inputs.mask_t)
  target = jnp.asarray(rng.integers(0, words, mask.size), jnp.int32)

  def terms(function, proximal):
    if function is None:
      return {}
    logits = jnp.asarray(rng.standard_normal((mask.size, words)), jnp.float32)
    return function(jax.nn.log_softmax(logits), target, proximal)

  held = terms(proximal_terms(objective), {})
  found = merged(held, terms(current_terms(objective, score_proximal=True), held))

  def filled(value):
    value = np.array(value).reshape(*mask.shape, *value.shape[1:])
    value[~mask] = masked if np.issubdtype(value.dtype, np.floating) else 2**30
    return jnp.asarray(value)

  return inputs._replace(vocabulary=jax.tree.map(filled, found))


def _trajectory(tokens, reward, prompt=7, roles=()):
  """One turn after a prompt of one token; the log-prob of a token depends on its id alone."""
  tokens = np.concatenate([[prompt], np.asarray(tokens)]).astype(np.int32)
  sampled = np.arange(len(tokens)) > 0
  log_probs = np.where(sampled, -0.2 - 0.1 * (tokens % 7), 0.0).astype(np.float32)
  return Trajectory(
    group_id=0,
    sample_index=0,
    prompt_id='p',
    tokens=tokens,
    source_t=sampled.astype(np.int8),
    mask_t=sampled,
    behaviour_log_probs_t=log_probs,
    raw_log_probs_t=log_probs,
    version_t=np.where(sampled, 0, -1).astype(np.int32),
    finish_reason=FinishReason.STOP,
    reward=Reward(value=float(reward)),
    roles=roles,
  )


def _reward_batch(
  rewards,
  group,
  length=None,
  truncated=None,
  tokens=None,
  metadata=None,
  steps=None,
  turns=None,
  roles=None,
  greedy=None,
):
  size = len(rewards)
  length = np.full(size, 3) if length is None else np.asarray(length)
  if tokens is None:  # of the reward and the place: equal answers have equal rewards
    tokens = [
      (np.arange(n) * int(1 + 4 * abs(r))) % 5 for n, r in zip(length, rewards, strict=True)
    ]
  return RewardBatch(
    reward=np.asarray(rewards, np.float64),
    group=np.asarray(group),
    length=length,
    sampled=length,
    truncated=np.zeros(size, bool) if truncated is None else np.asarray(truncated),
    keep=np.ones(size, bool),
    turn_t=tuple(np.asarray(t, np.int32) for t in turns or [np.zeros(n) for n in length]),
    version_t=tuple(np.zeros(n, np.int32) for n in length),
    steps=tuple(
      Steps(np.array([p for p, _ in s], int), np.array([r for _, r in s], float))
      for s in steps or [()] * size
    ),
    greedy_reward=None if greedy is None else np.asarray(greedy, np.float64)[np.asarray(group)],
    trajectories=tuple(
      _trajectory(t[:n], r, roles=tuple(agents))
      for t, n, r, agents in zip(tokens, length, rewards, roles or [()] * size, strict=True)
    ),
    metadata=({},) * size if metadata is None else tuple(metadata),
    log_probs_t=tuple(np.full(n, -0.7, np.float32) for n in length),
    anchor_log_probs_t=tuple(np.full(n, -1.0, np.float32) for n in length),
  )


@pytest.fixture(scope='session')
def whole_loss():
  """Function (objective, inputs [M, rows, N], state) -> LossParts of all micro-batches added."""
  return _whole_loss


@pytest.fixture(scope='session')
def make_inputs():
  """Function (seed, masked, drift, rows) -> LossInputs of [2, rows, 9]; masked places hold `masked`."""
  return _inputs


@pytest.fixture(scope='session')
def with_vocabulary():
  """Function (objective, inputs, masked) -> the inputs with the results of its vocabulary hooks."""
  return _with_vocabulary


@pytest.fixture(scope='session')
def make_reward_batch():
  """Function (rewards, group, and what each trajectory has) -> RewardBatch.

  steps: [(place, reward), ...] each; turns: turn of every token each; roles: of the turns each; greedy:
  the greedy reward of each group.
  """
  return _reward_batch
