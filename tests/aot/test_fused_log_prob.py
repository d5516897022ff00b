"""Fused log-probs compiled by libtpu at the vocabularies of real models."""

import jax.numpy as jnp
import pytest

from rlax_stack.pallas_kernels.fused_log_prob import fused_log_prob

pytest.importorskip('libtpu')


@pytest.mark.parametrize(
  ('generation', 'sizes', 'width', 'vocab', 'soft_cap'),
  [
    ('v5e', {}, 4096, 151936, None),
    ('v5p', {}, 8192, 128256, None),
    ('v6e', {}, 3584, 152064, None),
    ('tpu7x', {}, 5120, 151936, None),
    ('v5e', {}, 2304, 256000, 30.0),
    ('v5e', {'fsdp': 2, 'tensor': 2}, 4096, 151936, None),
  ],
)
def test_scores(generation, sizes, width, vocab, soft_cap, make_tpu_mesh, compile_for):
  mesh = make_tpu_mesh(generation, **sizes)

  def score(hidden, head, targets):
    return fused_log_prob(hidden, head, targets, soft_cap=soft_cap, mesh=mesh)[:3]

  count, rows = 8192, ('data', 'fsdp')
  compiled = compile_for(
    mesh,
    score,
    hidden=((count, width), jnp.bfloat16, (rows, None)),
    head=((vocab, width), jnp.bfloat16, ('tensor', 'fsdp')),
    targets=((count,), jnp.int32, (rows,)),
  )
  text = compiled.as_text()
  assert 'tpu_custom_call' in text
  # No tile of logits is written out; over fsdp the rows of the head are gathered.
  gathered = vocab * width if sizes else 0
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * gathered + (16 << 20)
