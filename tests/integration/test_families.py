"""Phi-3, Gemma 2 and Gemma 3 through the real scheduler and learner: what is sampled is what is trained on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner.packing import RowShape, pack_groups, pack_separate
from rlax_stack.learner.scoring import ForwardSettings, target_log_probs
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig, RopeScaling
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.trajectory import make_trajectory
from rlax_stack.sharding import make_mesh
from rlax_stack.types import Group, Prompt, SamplingParams

_TINY = ModelConfig(
  vocab_size=67,
  hidden_size=32,
  intermediate_size=48,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rms_norm_eps=1e-6,
  max_context=128,
)
_GEMMA = {
  'activation': 'gelu_tanh',
  'post_norms': True,
  'unit_offset_norms': True,
  'scale_embeddings': True,
}
_FAMILIES = {
  'phi3': {
    'partial_rotary_factor': 0.75,
    'sliding_window': 9,
    'rope_scaling': RopeScaling(kind='factors', factors=(1.0, 2.0, 4.0), attention_factor=1.2),
    'tie_embeddings': False,
  },
  'gemma2': {
    **_GEMMA,
    'sliding_window': 6,
    'global_layers': (1,),
    'query_pre_attn_scalar': 6,
    'attention_soft_cap': 2.0,
    'final_soft_cap': 4.0,
  },
  'gemma3': {
    **_GEMMA,
    'qk_norm': True,
    'sliding_window': 5,
    'global_layers': (2,),
    'rope_theta': 1000.0,
    'local_rope_theta': 20.0,
    'rope_scaling': RopeScaling(kind='linear', factor=2.0),
  },
}
# Prompts of up to four pieces, windows shorter than a piece, answers of several pages.
_SIZES = EngineConfig(
  slots=8,
  max_prompt_tokens=64,
  max_new_tokens=24,
  chunk_steps=6,
  page_size=8,
  suffix_page_size=8,
  rows_per_block=4,
  prefill_chunk=16,
  prefill_tokens=32,
  kept_tokens=8,
)
_PROMPTS = (50, 9, 21)


def _config(name):
  return dataclasses.replace(_TINY, **_FAMILIES[name])


@functools.cache
def _params(name):
  rng, config = np.random.default_rng(0), _config(name)

  def draw(path, leaf):
    if path[-1].key == 'scale':
      return (0.3 * rng.standard_normal(leaf.shape) + (not config.unit_offset_norms)).astype('f4')
    return (1.5 * leaf.shape[-1] ** -0.5 * rng.standard_normal(leaf.shape)).astype('f4')

  return jax.tree_util.tree_map_with_path(draw, decoder.abstract_params(config))


def _scheduler(name, **sizes):
  scheduler = Scheduler(Engine(_config(name), dataclasses.replace(_SIZES, **sizes)), run_seed=0)
  scheduler.swap_params(_params(name), 0)
  return scheduler


def _requests(**sampling):
  rng = np.random.default_rng(1)
  prompts = [rng.integers(0, _TINY.vocab_size, length).astype(np.int32) for length in _PROMPTS]
  return [
    GenerationRequest(
      group_id=group,
      sample_index=index,
      prompt_tokens=prompt,
      sampling=SamplingParams(max_tokens=20 - 3 * index, **sampling),
    )
    for group, prompt in enumerate(prompts)
    for index in range(3)
  ]


@functools.cache
def _samples(name):
  """Of the requests, with prompts in pieces, token by token."""
  return _scheduler(name).generate_all(_requests())


def _groups(samples):
  groups = []
  for group_id in range(len(_PROMPTS)):
    mine = [sample for sample in samples if sample.request.group_id == group_id]
    groups.append(
      Group(
        group_id=group_id,
        prompt=Prompt(prompt_id=f'p{group_id}', messages=(), answer=''),
        prompt_tokens=mine[0].request.prompt_tokens,
        trajectories=tuple(make_trajectory(sample, prompt_id=f'p{group_id}') for sample in mine),
      )
    )
  return groups


def _packed(groups, pack=pack_groups):
  advantages = [np.zeros(len(group.trajectories)) for group in groups]
  batch = pack(groups, advantages, row_shapes=[RowShape(128, 64)], rows_multiple=2)
  return jax.tree.map(jnp.asarray, batch)


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def _scored(params, config, rows, settings, mesh=None):
  return target_log_probs(params, config, rows, settings, mesh).log_prob


def _of_trajectories(batch, values):
  """Values [R, N] of every trajectory in the order of its tokens."""
  count = int(batch.trajectory_t.max()) + 1
  return [
    np.asarray(values)[np.asarray(batch.trajectory_t == i) & batch.mask_t] for i in range(count)
  ]


@pytest.mark.parametrize('name', _FAMILIES)
def test_the_learner_scores_what_the_engine_sampled(name):
  config, settings, samples = _config(name), ForwardSettings(), _samples(name)
  batch = _packed(_groups(samples))
  found = _of_trajectories(batch, _scored(_params(name), config, batch, settings))
  assert len(found) == len(samples) == 9
  for ours, sample in zip(found, samples, strict=True):
    assert np.abs(ours - sample.raw_log_probs_t).max() < 1e-4
  # Windows and prompts in pieces are really there, and the model has an opinion.
  assert np.std(np.concatenate(found)) > 0.3


def test_filtered_samples_are_scored_within_their_kept_sets():
  name = 'gemma2'  # with a cap of the logits
  settings = ForwardSettings(temperature=0.8)
  samples = _scheduler(name).generate_all(_requests(temperature=0.8, top_k=6))
  batch = _packed(_groups(samples))
  found = _of_trajectories(batch, _scored(_params(name), _config(name), batch, settings))
  for ours, sample in zip(found, samples, strict=True):
    assert np.abs(ours - sample.log_probs_t).max() < 1e-4
    assert np.abs(sample.log_probs_t - sample.raw_log_probs_t).max() > 1e-2


@pytest.mark.parametrize('name', ['gemma2', 'gemma3'])
def test_packed_trees_equal_separate_rows(name):
  """Log-probs and the gradient of their weighted sum, whole and split over a mesh."""
  config, params, settings = _config(name), _params(name), ForwardSettings(remat='layer')
  groups = _groups(_samples(name))
  batches = _packed(groups), _packed(groups, pack_separate)
  assert batches[0].tokens.shape[0] < batches[1].tokens.shape[0]

  @functools.partial(jax.jit, static_argnums=2)
  def run(params, batch, mesh):
    def loss(params):
      log_prob = target_log_probs(params, config, batch, settings, mesh).log_prob
      weight = jnp.cos(batch.trajectory_t.astype(jnp.float32))
      return jnp.sum(jnp.where(batch.mask_t, weight * log_prob, 0.0)), log_prob

    return jax.grad(loss, has_aux=True)(params)

  mesh = make_mesh({'fsdp': 2, 'tensor': 2}, jax.devices()[:4])
  (gradient, log_probs), (other, alone), (split, _) = (
    run(params, batch, where)
    for batch, where in ((batches[0], None), (batches[1], None), (batches[0], mesh))
  )
  for got, want in zip(
    _of_trajectories(batches[0], log_probs), _of_trajectories(batches[1], alone), strict=True
  ):
    np.testing.assert_allclose(got, want, atol=2e-5)
  for ours in (gradient, split):
    for (path, leaf), theirs in zip(
      jax.tree.leaves_with_path(ours), jax.tree.leaves(other), strict=True
    ):
      size = np.linalg.norm(theirs)
      assert np.linalg.norm(leaf - theirs) <= 1e-4 * size, jax.tree_util.keystr(path)
      assert size > 0


@pytest.mark.parametrize('name', ['gemma2', 'gemma3'])
def test_other_ways_through_the_engine_give_the_same_numbers(name):
  """Whole prompts, checked proposals, scores of given texts, and attention of given texts."""
  requests, samples = _requests(), _samples(name)
  whole = _scheduler(name, prefill_chunk=64, prefill_tokens=64)
  drafted = [
    dataclasses.replace(r, draft_tokens=s.tokens) for r, s in zip(requests, samples, strict=True)
  ]
  checking = _scheduler(name, max_draft=3, slots=32)
  for other in (whole.generate_all(requests), checking.generate_all(drafted)):
    for got, want in zip(other, samples, strict=True):
      np.testing.assert_array_equal(got.tokens, want.tokens)
      np.testing.assert_allclose(got.raw_log_probs_t, want.raw_log_probs_t, atol=1e-4)
  assert checking.stats.accepted_tokens > 20
  texts = [np.concatenate([s.request.prompt_tokens, s.tokens]) for s in samples]
  for score, sample in zip(whole.score(texts), samples, strict=True):
    got = score.log_probs_t[len(sample.request.prompt_tokens) :]
    np.testing.assert_allclose(got, sample.raw_log_probs_t, atol=1e-4)
  received = whole.attention_received(texts[0], 0)
  assert received.sum() == pytest.approx(len(texts[0]), abs=1e-3)
  far = whole.attention_received(texts[0], 12)
  assert 0 < far.sum() < received.sum()


def test_quantised_weights_decode_as_they_prefill():
  name = 'gemma3'
  scheduler = _scheduler(name, weights='int8')
  samples = scheduler.generate_all(_requests())
  texts = [np.concatenate([s.request.prompt_tokens, s.tokens]) for s in samples]
  for score, sample in zip(scheduler.score(texts), samples, strict=True):
    got = score.log_probs_t[len(sample.request.prompt_tokens) :]
    np.testing.assert_allclose(got, sample.raw_log_probs_t, atol=2e-4)
  plain = _scheduler(name).score(texts)[0].log_probs_t[1:]
  difference = np.abs(plain - scheduler.score(texts)[0].log_probs_t[1:])
  assert 0 < difference.mean() < 0.2
