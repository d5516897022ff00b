"""The gradient of a packed tree through a whole decoder, against the sum over a copy per sample.

Losses go through (source, target) triples: the last token of a prompt is the source of every sample's first token.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.pallas_kernels import tree_attention_tpu, tree_rows
from rlax_stack.pallas_kernels.fused_log_prob import fused_log_prob
from rlax_stack.pallas_kernels.tree_attention import AttentionShape, prepare_tree_attention

_CONFIG = ModelConfig(
  vocab_size=61,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  qk_norm=True,
  tie_embeddings=False,
)
# A prompt over the edge of a block, samples, and a second level that three of them share.
_PROMPT, _MIDDLE, _TOKENS = 129, 20, 384
_DIRECT, _BRANCHED = (60, 1, 31), (40, 7, 50)


def _packed():
  """Positions, subtree ends and, for each sample, the places of its tokens, prompt included."""
  prompt, paths, start = [*range(_PROMPT)], [], _PROMPT
  ends = np.arange(1, _TOKENS + 1)
  for length in _DIRECT:
    paths.append([*prompt, *range(start, start + length)])
    ends[start : start + length] = start + length
    start += length
  middle = [*range(start, start + _MIDDLE)]
  start += _MIDDLE
  for length in _BRANCHED:
    paths.append([*prompt, *middle, *range(start, start + length)])
    ends[start : start + length] = start + length
    start += length
  ends[prompt] = ends[middle] = start
  positions = np.zeros(_TOKENS, np.int32)
  for path in paths:
    positions[path] = range(len(path))
  return positions, ends.astype(np.int32), paths


def _attention(form, positions, ends):
  if form == 'interpreted':
    spec = tree_attention_tpu.TpuSpec(
      scale=_CONFIG.head_dim**-0.5,
      window=None,
      soft_cap=None,
      block_q=128,
      block_kv=128,
      vmem_limit=1 << 26,
      interpret=True,
    )
    parts = tree_attention_tpu.make_tables, tree_attention_tpu.attend
    kernel = tree_rows.Kernel(spec, 128, 128, *parts)
    layout = tree_rows.lay_out(kernel, positions, ends)
    return lambda q, k, v: tree_rows.attend_rows(kernel, layout, q, k, v, None)
  shape = AttentionShape(_CONFIG.num_heads, _CONFIG.num_kv_heads, _CONFIG.head_dim, jnp.float32)
  return prepare_tree_attention(positions, ends, shape=shape, implementation=form)


def _causal(q, k, v):
  """Plain causal attention of rows that are one sequence each."""
  ratio, index = q.shape[2] // k.shape[2], jnp.arange(q.shape[1])
  k, v = jnp.repeat(k, ratio, 2), jnp.repeat(v, ratio, 2)
  scores = jnp.einsum('rihd,rjhd->rhij', q, k) * q.shape[-1] ** -0.5
  seen = (index[None] <= index[:, None])[None, None]
  return jnp.einsum('rhij,rjhd->rihd', jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1), v)


def _loss(params, tokens, positions, attend, triples):
  """Sum over triples (row, source, target token, weight) of weight times the target's log-prob."""
  row, source, target, weight = triples
  hidden = decoder.hidden_states(params, _CONFIG, tokens, positions, attend)
  head = decoder.lm_head(params, _CONFIG)
  scored = fused_log_prob(hidden[row, source], head, target, implementation='xla')
  return -(weight * scored.log_prob).sum()


def _triples(tokens, paths, weights, *, separate):
  """Of every token below the prompt; places are in the packed row, or in a row per sample."""
  found = []
  for sample, (path, weight) in enumerate(zip(paths, weights, strict=True)):
    for i in range(_PROMPT, len(path)):
      place = (sample, i - 1) if separate else (0, path[i - 1])
      found.append((*place, tokens[path[i]], weight))
  row, source, target, weight = zip(*found, strict=True)
  integers = (jnp.asarray(x, jnp.int32) for x in (row, source, target))
  return *integers, jnp.asarray(weight, jnp.float32)


@pytest.mark.parametrize('form', ['interpreted', 'xla'])
def test_gradient_of_the_parameters_is_that_of_separate_copies(form):
  rng = np.random.default_rng(0)
  positions, ends, paths = _packed()
  tokens = rng.integers(0, _CONFIG.vocab_size, _TOKENS).astype(np.int32)
  weights = rng.standard_normal(len(paths))
  params = decoder.init_params(_CONFIG, jax.random.key(0))

  @functools.partial(jax.jit, static_argnames='form')
  def packed(params, tokens, positions, ends, triples, form):
    attend = _attention(form, positions, ends)
    return jax.value_and_grad(_loss)(params, tokens, positions, attend, triples)

  @jax.jit
  def separate(params, tokens, triples):
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return jax.value_and_grad(_loss)(params, tokens, places, _causal, triples)

  row = tuple(jnp.asarray(x)[None] for x in (tokens, positions, ends))
  loss, grads = packed(params, *row, _triples(tokens, paths, weights, separate=False), form)
  copies = np.zeros((len(paths), max(map(len, paths))), np.int32)
  for copy, path in zip(copies, paths, strict=True):
    copy[: len(path)] = tokens[path]
  triples = _triples(tokens, paths, weights, separate=True)
  expected, want = separate(params, jnp.asarray(copies), triples)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  for (path, ours), theirs in zip(
    jax.tree.leaves_with_path(grads), jax.tree.leaves(want), strict=True
  ):
    error, size = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
    assert error <= 1e-5 * size, (jax.tree_util.keystr(path), error / size)
    assert size > 0
