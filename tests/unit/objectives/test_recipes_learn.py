"""Every recipe raises the reward of a tabular policy on a toy task, on policy and four versions stale.

No transformer: the policy is a table of logits by prompt and position, the task is to say each
prompt's own word at each position before saying stop. A critic is a table of values, of the same.
Everything between reward and gradient is real.
"""

import functools
import importlib
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlax_stack import objective_rules
from rlax_stack.config import from_config_dict
from rlax_stack.learner.critic import values_after, values_before
from rlax_stack.learner.scoring import TargetScores
from rlax_stack.learner.state import averaged
from rlax_stack.objectives import loss, metrics
from rlax_stack.objectives.critics.value_loss import value_loss
from rlax_stack.objectives.host import advantages_of
from rlax_stack.objectives.inputs import added
from rlax_stack.objectives.vocabulary import current_terms, proximal_terms
from rlax_stack.types import PackedBatch

_ROOT = pathlib.Path(__file__).parents[3]
_NAMES = sorted(p.stem for p in (_ROOT / 'configs' / 'recipes').glob('*.py') if p.stem[0] != '_')
# Each recipe compiles a program of its own: a few stand for all in the quick tier.
_QUICK = ('dapo', 'grpo', 'gspo')
RECIPES = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _NAMES]
_PROMPTS, _SAMPLES, _LENGTH, _WORDS, _STEPS = 4, 8, 4, 5, 30


class _Samples(NamedTuple):
  """One batch of the toy task, [B, _LENGTH] and [B]."""

  tokens: np.ndarray
  mask: np.ndarray
  log_probs: np.ndarray
  reward: np.ndarray


def _log_policy(logits):
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _sample(rng, logits, target):
  """_SAMPLES answers to each prompt; word 0 ends an answer and belongs to it."""
  prompt = np.repeat(np.arange(_PROMPTS), _SAMPLES)
  policy = _log_policy(logits)[prompt]
  tokens = (policy + rng.gumbel(size=policy.shape)).argmax(-1)
  stopped = np.cumsum(tokens == 0, 1) - (tokens == 0)
  mask = stopped == 0
  log_probs = np.take_along_axis(policy, tokens[..., None], 2)[..., 0]
  reward = ((tokens == target[prompt]) & mask).sum(1) / _LENGTH
  return _Samples(tokens, mask, log_probs, reward)


def _greedy_reward(logits, target):
  """Reward of the likeliest answer to each prompt."""
  tokens = logits.argmax(-1)
  spoken = np.cumsum(tokens == 0, 1) - (tokens == 0) == 0
  return ((tokens == target) & spoken).sum(1) / _LENGTH


def _batch(samples, version, found):
  """The samples as PackedBatch of [2, B / 4, 2 * _LENGTH]: two answers to a row."""
  shape = (2, len(samples.reward) // 4, 2 * _LENGTH)
  index = np.arange(len(samples.reward))[:, None]
  adv = np.zeros(samples.mask.shape, np.float32)
  mask = samples.mask & found.keep[:, None]
  for row, values in enumerate(found.adv_t):
    adv[row, samples.mask[row]] = values
  fields = {
    'mask_t': mask,
    'target_t': samples.tokens.astype(np.int32),
    'source_index_t': (index // _SAMPLES * _LENGTH + np.arange(_LENGTH)).astype(np.int32),
    'trajectory_t': np.where(mask, index, -1).astype(np.int32),
    'group_t': np.where(mask, index // _SAMPLES, -1).astype(np.int32),
    'turn_t': np.zeros(mask.shape, np.int32),
    'adv_t': adv,
    'reward_t': np.broadcast_to(found.reward[:, None], mask.shape),
    'behaviour_log_probs_t': samples.log_probs.astype(np.float32),
    'proximal_log_probs_t': np.zeros(mask.shape, np.float32),
    'version_t': np.full(mask.shape, version, np.int32),
    'next_index_t': _next_places(samples.mask, index),
  }
  fields = {name: np.reshape(value, shape) for name, value in fields.items()}
  return fields


def _next_places(mask, index):
  """Place of the state after each word; an answer ends with its last word."""
  following = index // _SAMPLES * _LENGTH + np.arange(1, _LENGTH + 1)
  goes_on = np.concatenate([mask[:, 1:], np.zeros((len(mask), 1), bool)], 1)
  return np.where(goes_on, following, -1).astype(np.int32)


def _score(logits, fields, terms=None):
  shape = fields['target_t'].shape
  log_policy = jax.nn.log_softmax(logits.reshape(-1, _WORDS))[fields['source_index_t']]
  log_prob = jnp.take_along_axis(log_policy, fields['target_t'][..., None], axis=-1)[..., 0]
  entropy = -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1)
  if terms is None:
    return TargetScores(log_prob, entropy)
  flat, target = log_policy.reshape(-1, _WORDS), fields['target_t'].reshape(-1)
  known = fields.get('proximal_vocabulary', {})
  known = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(shape) :]), known)
  found = terms(flat, target, known)
  found = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)
  return TargetScores(log_prob, entropy, found)


def _gradient_norms(logits, fields):
  """The squared norm of ∇ Σ log π of every answer, at each of its tokens."""
  ids = jnp.where(fields['mask_t'], fields['trajectory_t'], 0).reshape(-1)
  count = _PROMPTS * _SAMPLES

  def sums(logits):
    log_probs = jnp.where(fields['mask_t'], _score(logits, fields).log_prob, 0.0)
    return jax.ops.segment_sum(log_probs.reshape(-1), ids, num_segments=count)

  norms = jnp.sum(jax.jacrev(sums)(logits).reshape(count, -1) ** 2, axis=1)
  return norms[ids].reshape(fields['mask_t'].shape)


def _values(table, fields):
  """Values before and after every word, of a critic's table."""
  rows = PackedBatch(**{name: None for name in PackedBatch._fields} | dict(fields))
  flat = rows._replace(
    source_index_t=rows.source_index_t.reshape(1, -1), next_index_t=rows.next_index_t.reshape(1, -1)
  )
  found = values_before(table.reshape(1, -1), flat), values_after(table.reshape(1, -1), flat)
  return tuple(x.reshape(rows.mask_t.shape) for x in found)


def _value_update(settings, optimizer, table, opt_state, fields, prepared):
  """The critic's table after its updates on one batch."""

  def whole(table):
    count, start = prepared.denominators.tokens, prepared.tokens['value_t']
    value, target = _values(table, fields)[0], prepared.tokens['target_t']
    return value_loss(settings, value, start, target, fields['mask_t'], count).loss

  for _ in range(settings.updates):
    with jax.numpy_dtype_promotion('standard'):
      updates, opt_state = optimizer.update(jax.grad(whole)(table), opt_state)
    table = table + updates
  return table, opt_state


@functools.cache
def _make_step(objective, score_proximal):
  optimizer, critic = optax.adam(0.2), objective.critic_settings
  terms = current_terms(objective, score_proximal=score_proximal)

  def step(logits, opt_state, state, fields, version, others, values):
    anchor, proximal, teacher = others
    nothing = dict.fromkeys(('tokens', 'positions', 'subtree_end'), fields['target_t'])
    fields = fields | {'anchor_log_probs_t': _score(anchor, fields).log_prob}
    if 'teacher' in objective.tags:
      fields |= {'teacher_log_probs_t': _score(teacher, fields).log_prob}
    if score_proximal:
      old = _score(proximal, fields, proximal_terms(objective))
      fields |= {'proximal_log_probs_t': old.log_prob, 'proximal_vocabulary': old.vocabulary}
    if critic is not None:
      before, after = _values(values[0], fields)
      fields = fields | {'value_t': before, 'next_value_t': after}
    batch = PackedBatch(**nothing, **fields)
    settings = {'version': version, 'score_proximal': score_proximal}
    held = jax.lax.stop_gradient(_score(logits, fields, terms))
    norms = _gradient_norms(logits, fields)
    prepared = loss.prepare(objective, loss.loss_inputs(batch, held, **settings), state, norms)

    def whole(logits):
      total = None
      for i in range(2):
        rows, tokens = jax.tree.map(lambda x, i=i: x[i], (batch, prepared.tokens))
        inputs = loss.loss_inputs(rows, _score(logits, rows._asdict(), terms), **settings)
        part = loss.policy_loss(objective, inputs, prepared._replace(tokens=tokens), state)
        total = part if total is None else added(total, part)
      return total.loss, total

    gradient, total = jax.grad(whole, has_aux=True)(logits)
    with jax.numpy_dtype_promotion('standard'):
      updates, opt_state = optimizer.update(gradient, opt_state)
    if prepared.step_scale is not None:
      updates = prepared.step_scale * updates
    found = metrics.finished(total)
    if critic is not None:
      values = _value_update(critic, optimizer, *values, fields, prepared)
      moves = version >= critic.pretrain_updates
      updates = jnp.where(moves, updates, 0.0)
    return logits + updates, opt_state, objective.update_state(state, found), found, values

  return jax.jit(step), optimizer


def learn(objective, make_reward_batch, *, staleness, updates=1, seed=0):
  """Mean rewards of the first and of the last five of _STEPS steps, and the last metrics."""
  decay = objective.average_decay
  step, optimizer = _make_step(objective, updates > 1 or decay is not None)
  rng = np.random.default_rng(seed)
  target = rng.integers(1, _WORDS, (_PROMPTS, _LENGTH))
  anchor = jnp.zeros((_PROMPTS, _LENGTH, _WORDS), jnp.float32)
  teacher = 4.0 * jax.nn.one_hot(target, _WORDS, dtype=jnp.float32)
  logits, opt_state, state = anchor, optimizer.init(anchor), objective.init_state()
  table = jnp.zeros((_PROMPTS, _LENGTH), jnp.float32)
  values = table, optimizer.init(table)
  group = np.repeat(np.arange(_PROMPTS), _SAMPLES)
  average = {'params': logits, 'weight': jnp.float32(1.0)}
  history, rewards, found, carried = [np.asarray(logits)], [], {}, objective.init_host_state()
  for version in range(_STEPS):
    oldest = max(version - staleness, 0)
    samples = _sample(rng, history[oldest], target)
    batch = make_reward_batch(
      samples.reward,
      group,
      samples.mask.sum(1),
      tokens=samples.tokens,
      greedy=_greedy_reward(history[oldest], target),
    )
    estimate = advantages_of(objective, batch, carried)
    fields, carried = _batch(samples, oldest, estimate), estimate.state
    proximal = logits
    for _ in range(updates):
      proximal = proximal if decay is None else average['params']
      logits, opt_state, state, found, values = step(
        logits, opt_state, state, fields, np.int32(version), (anchor, proximal, teacher), values
      )
      average = average if decay is None else averaged(average, logits, decay)
    history.append(np.asarray(logits))
    rewards.append(samples.reward.mean())
  return np.mean(rewards[:5]), np.mean(rewards[-5:]), found


@pytest.mark.parametrize('staleness', [0, 4])
@pytest.mark.parametrize('name', RECIPES)
def test_recipe_raises_the_reward(name, staleness, make_reward_batch):
  config = importlib.import_module(f'configs.recipes.{name}').get_config()
  config.fleet.max_staleness = staleness
  config.rollout.max_tokens = 2 * _LENGTH  # no answer is near it
  pretraining = re.sub(r'pretrain_updates=\d+', 'pretrain_updates=5', config.objective.critic)
  config.objective.critic = pretraining  # of the 30 steps
  objective = objective_rules.resolve_objective(from_config_dict(config))
  assert not list(objective_rules.objective_problems(from_config_dict(config)))
  before, after, found = learn(
    objective, make_reward_batch, staleness=staleness, updates=config.learner.updates_per_batch
  )
  assert all(np.isfinite(value) for value in found.values())
  assert after > before + 0.1
