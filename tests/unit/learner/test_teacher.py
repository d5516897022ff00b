"""A teacher beside the learner: its scores are its own, and the policy comes nearer to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.learner.group_parts import of_trained_tokens, without
from rlax_stack.learner.teacher import Teacher, check_teacher, make_teacher_score, teacher_forward
from rlax_stack.models import decoder
from rlax_stack.models.adapter import AdapterSettings
from rlax_stack.objectives.objective import resolve
from rlax_stack.sharding import make_mesh

DISTILL = resolve(
  advantage='teacher', trust_region='none', corrections=(), regularisers=('kl_teacher(coef=0.0)',)
)


@pytest.fixture(scope='module')
def teacher(tiny):
  """A wider model of three layers."""
  config = dataclasses.replace(tiny, num_layers=3, hidden_size=24, tie_embeddings=False)
  rng = np.random.default_rng(5)
  params = jax.tree.map(
    lambda leaf: (0.3 * rng.standard_normal(leaf.shape) + 0.1).astype(np.float32),
    decoder.abstract_params(config),
  )
  return Teacher(config, params)


def _own_log_probs(teacher, tokens):
  """log π(token | those before it), every token of one sequence, without rows or kernels of the learner."""
  count = len(tokens)

  def attend(q, k, v, **_):
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits = jnp.einsum('rqgnh,rkgh->rgnqk', q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones((count, count), bool))
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
    return jnp.einsum('rgnqk,rkgh->rqgnh', weights, v).reshape(1, count, -1, v.shape[3])

  hidden = decoder.hidden_states(
    teacher.params,
    teacher.config,
    jnp.asarray(tokens)[None],
    jnp.arange(count, dtype=jnp.int32)[None],
    attend,
    compute_dtype=jnp.float32,
  )
  logits = hidden[0] @ decoder.lm_head(teacher.params, teacher.config).T
  log_policy = jax.nn.log_softmax(logits, axis=-1)
  return np.asarray(log_policy)[np.arange(count - 1), np.asarray(tokens)[1:]]


@pytest.mark.parametrize('mesh', [{}, {'fsdp': 2, 'tensor': 2}], ids=str)
def test_scores_are_those_of_the_teacher_over_each_sequence(
  mesh, make_learner, make_groups, teacher, tiny, settings
):
  learner, groups = make_learner(mesh=mesh), make_groups()
  packed, _ = learner._pack_to_train(groups)
  devices = jax.devices()[: int(np.prod(list(mesh.values()) or [1]))]
  asking = dataclasses.replace(settings, objective=DISTILL)
  score = make_teacher_score(teacher, tiny, asking, make_mesh(mesh, devices))
  got = np.asarray(score(*learner._place(packed))).reshape(-1, packed.target_t.shape[1])
  flat = [t for group in groups for t in group.trajectories]
  for index in (0, len(flat) - 1):
    trajectory = flat[index]
    want = _own_log_probs(teacher, trajectory.tokens)[trajectory.mask_t[1:]]
    found = got[: packed.tokens.shape[0]][packed.trajectory_t == index]
    np.testing.assert_allclose(found, want, atol=1e-5, rtol=1e-5)


def test_the_policy_comes_nearer_to_the_teacher(make_learner, make_groups, teacher, settings):
  """Samples that the teacher likes become likelier, and those that it does not like less."""
  slow = dataclasses.replace(settings.optimizer, learning_rate=3e-3)
  learner = make_learner(objective=DISTILL, teacher=teacher, optimizer=slow)
  groups = make_groups(sizes=(4, 4), prompt_lengths=(5, 6))

  def sampled(groups):
    """As if the policy of now had drawn them."""
    return [
      dataclasses.replace(
        group,
        trajectories=tuple(
          dataclasses.replace(t, behaviour_log_probs_t=s, raw_log_probs_t=s)
          for t, s in zip(group.trajectories, scores, strict=True)
        ),
      )
      for group, scores in zip(groups, learner.score(groups), strict=True)
    ]

  packed, _ = learner._pack_to_train(groups)
  batch, num_micro = learner._place(packed)
  likes = np.asarray(learner._teacher_score(batch, num_micro)).reshape(-1)
  trained = np.asarray(batch.mask_t).reshape(-1)

  def gap():
    scores = learner._score(learner.params, batch, num_micro)
    return (likes - np.asarray(scores).reshape(-1))[trained]

  before = gap()
  for _ in range(5):
    metrics = learner.train(sampled(groups)).result()
  assert np.isfinite(metrics['kl_teacher']) and metrics['skipped'] == 0
  after = gap()
  assert (after * before).sum() < 0.9 * (before * before).sum()


def test_parts_of_a_batch(make_groups):
  group = make_groups()[0]
  every = [[np.arange(len(t.tokens), dtype=np.float32) for t in group.trajectories]]
  found = of_trained_tokens([group], every)
  for trajectory, values in zip(group.trajectories, found, strict=True):
    np.testing.assert_array_equal(values, np.flatnonzero(trajectory.mask_t))
  keep = np.arange(len(group.trajectories)) > 0
  left = without(group, keep).trajectories
  assert not left[0].mask_t.any() and left[1] is group.trajectories[1]
  assert without(group, np.ones_like(keep)) is group


def test_a_teacher_computes_as_the_policy_does_without_what_training_needs(settings):
  adapter = AdapterSettings(kind='lora', rank=2, alpha=4.0, targets=('*',))
  forward = dataclasses.replace(settings.forward, temperature=0.7, remat='layer', adapter=adapter)
  assert teacher_forward(forward) == dataclasses.replace(settings.forward, temperature=0.7)


def test_what_does_not_fit_is_refused(make_learner, tiny):
  with pytest.raises(ConfigError, match='Set config.learner.teacher'):
    make_learner(objective=DISTILL)
  other = dataclasses.replace(tiny, vocab_size=65)
  with pytest.raises(ConfigError, match='has 65 tokens and the policy 64'):
    check_teacher(other, tiny)
