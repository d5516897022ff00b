"""What packing a group is worth in the FLOPs of the compiled step, against its samples one by one.

`cost_analysis` counts the body of a loop once, so one layer is compiled and multiplied; the head, the same in both, is
counted by hand: logits, logits once more in the backward pass, and two products of gradients.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.pallas_kernels import block_sizes, block_tables
from rlax_stack.pallas_kernels.tree_attention import AttentionShape, prepare_tree_attention

pytest.importorskip('libtpu')

_LAYER_OF_8B = ModelConfig(
  vocab_size=151936,
  hidden_size=4096,
  intermediate_size=12288,
  num_layers=1,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
)
_PROMPT, _SAMPLE, _SAMPLES = 4096, 1024, 8


def _layer_flops(mesh, compile_for, rows, ends):
  """FLOPs of one layer, forward and backward, over rows with these subtree ends."""
  config, tokens = _LAYER_OF_8B, len(ends)
  shape = AttentionShape(32, 8, 128, jnp.bfloat16)
  blocks = block_sizes.tree_blocks('TPU v5', group=4, head_dim=128, itemsize=2, tokens=tokens)
  kinds = block_tables.block_kinds(
    jnp.zeros((1, tokens), jnp.int32), ends[None], block_q=blocks.q, block_kv=blocks.kv
  )
  visits = int(block_tables.block_list(kinds).count[0])

  def loss(params, ids, positions, ends):
    attend = prepare_tree_attention(positions, ends, shape=shape, mesh=mesh, visits=visits)
    hidden = decoder.hidden_states(
      params, config, ids, positions, attend, compute_dtype=jnp.bfloat16
    )
    return hidden.astype(jnp.float32).sum()

  params = decoder.abstract_params(config)
  leaves, tree = jax.tree.flatten(params)

  def step(*arguments):
    return jax.grad(loss)(jax.tree.unflatten(tree, arguments[:-3]), *arguments[-3:])

  integers = ((rows, tokens), jnp.int32, ())
  arguments = {str(i): (x.shape, x.dtype, ()) for i, x in enumerate(leaves)}
  arguments |= {'ids': integers, 'positions': integers, 'ends': integers}
  return compile_for(mesh, step, quick=True, **arguments).cost_analysis()['flops']


def test_packing_saves_most_of_the_tokens_that_it_saves(make_tpu_mesh, compile_for):
  layer_flops = functools.partial(_layer_flops, make_tpu_mesh('v5p'), compile_for)
  total = _PROMPT + _SAMPLES * _SAMPLE
  own_end = _PROMPT + (np.arange(_SAMPLES * _SAMPLE) // _SAMPLE + 1) * _SAMPLE
  packed_ends = np.concatenate([np.full(_PROMPT, total), own_end]).astype(np.int32)
  length = _PROMPT + _SAMPLE
  head = 4 * 2 * _SAMPLES * _SAMPLE * _LAYER_OF_8B.vocab_size * _LAYER_OF_8B.hidden_size
  packed = 36 * layer_flops(1, jnp.asarray(packed_ends)) + head
  separate = 36 * layer_flops(_SAMPLES, jnp.full(length, length, jnp.int32)) + head
  token_ratio = _SAMPLES * length / total
  assert token_ratio == pytest.approx(10 / 3)
  assert 0.85 * token_ratio < separate / packed < token_ratio
