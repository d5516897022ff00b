"""Tree attention, forward and backward, compiled by libtpu at the shapes of real models."""

import jax
import jax.numpy as jnp
import pytest

from rlax_stack.pallas_kernels import block_sizes
from rlax_stack.pallas_kernels.tree_attention import tree_attention

pytest.importorskip('libtpu')

_GENERATIONS = ['v5e', 'v5p', 'v6e', 'tpu7x']

# Query heads, key heads, width.
_HEADS = {
  'Llama-3-8B and Qwen3-8B': (32, 8, 128),
  'Llama-3-70B and Qwen3-32B': (64, 8, 128),
  'Qwen2.5-7B': (28, 4, 128),
}


def _step(mesh, **options):
  def step(q, k, v, positions, subtree_end, sinks=None):
    def attend(q, k, v):
      arguments = (q, k, v, positions, subtree_end)
      return tree_attention(*arguments, mesh=mesh, sinks=sinks, **options)

    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(out)

  return step


def _arguments(rows, tokens, heads, kv_heads, width, dtype=jnp.bfloat16):
  by_head = (('data', 'fsdp'), 'context', 'tensor', None)
  by_row = (('data', 'fsdp'), None)
  return {
    'q': ((rows, tokens, heads, width), dtype, by_head),
    'k': ((rows, tokens, kv_heads, width), dtype, by_head),
    'v': ((rows, tokens, kv_heads, width), dtype, by_head),
    'positions': ((rows, tokens), jnp.int32, by_row),
    'subtree_end': ((rows, tokens), jnp.int32, by_row),
  }


def _check_memory(compiled, queries_bytes):
  """The temporary memory of a whole step is a few times the queries: nothing grows with tokens squared."""
  assert compiled.memory_analysis().temp_size_in_bytes <= 8 * queries_bytes


def _check_vmem(used, mesh, tokens, heads, kv_heads, width):
  """No kernel takes more than is reckoned for the hungriest, and that is at most half of what there is."""
  kind = mesh.devices.flat[0].device_kind
  blocks = block_sizes.tree_blocks(
    kind, group=heads // kv_heads, head_dim=width, itemsize=2, tokens=tokens
  )
  reckoned = block_sizes.tree_vmem(blocks.q, blocks.kv, heads // kv_heads, width, 2)
  assert set(used) == {'tree_attention', 'tree_attention_dq', 'tree_attention_dkv'}
  assert max(used.values()) <= reckoned <= block_sizes.vmem_bytes(kind) // 2


@pytest.mark.parametrize('generation', _GENERATIONS)
@pytest.mark.parametrize('name', _HEADS)
def test_one_chip(generation, name, make_tpu_mesh, compile_for, vmem_of):
  heads, kv_heads, width = _HEADS[name]
  mesh, arguments = make_tpu_mesh(generation), _arguments(1, 8192, heads, kv_heads, width)
  compiled = compile_for(mesh, _step(mesh), quick=generation != 'v5e', **arguments)
  _check_vmem(vmem_of(compiled), mesh, 8192, heads, kv_heads, width)
  _check_memory(compiled, 8192 * heads * width * 2)


@pytest.mark.parametrize('generation', _GENERATIONS)
@pytest.mark.parametrize('tokens', [32768, 131072])
@pytest.mark.parametrize(
  ('heads', 'chips'), [(32, 1), pytest.param(64, 4, marks=pytest.mark.aot_all)]
)
def test_long_rows(generation, tokens, heads, chips, make_tpu_mesh, compile_for, vmem_of):
  mesh = make_tpu_mesh(generation, tensor=chips)
  arguments = _arguments(1, tokens, heads, 8, 128)
  compiled = compile_for(mesh, _step(mesh), quick=True, **arguments)
  _check_vmem(vmem_of(compiled), mesh, tokens, heads, 8, 128)
  _check_memory(compiled, tokens * heads * 128 * 2 // chips)


@pytest.mark.parametrize(
  ('generation', 'sizes'),
  [
    ('v5e', {'fsdp': 2, 'tensor': 2}),
    ('v5p', {'context': 2, 'tensor': 2}),
    ('v6e', {'fsdp': 2, 'context': 2}),
    ('tpu7x', {'data': 2, 'fsdp': 2, 'tensor': 2}),
  ],
)
def test_several_chips(generation, sizes, make_tpu_mesh, compile_for):
  mesh = make_tpu_mesh(generation, **sizes)
  compiled = compile_for(mesh, _step(mesh), quick=True, **_arguments(4, 8192, 32, 8, 128))
  # Every device gathers the keys of whole rows; the queries it has are its own.
  _check_memory(compiled, 4 * 8192 * 32 * 128 * 2 // mesh.size)
  assert ('all-gather' in compiled.as_text()) == ('context' in sizes)


@pytest.mark.parametrize(
  ('heads', 'options'),
  [
    ((64, 8, 64), {'window': 128}),
    ((8, 4, 256), {'window': 4096, 'soft_cap': 50.0}),
    ((16, 1, 128), {}),
  ],
)
def test_windows_caps_and_widths(heads, options, make_tpu_mesh, compile_for):
  mesh = make_tpu_mesh('v5e')
  arguments = _arguments(1, 2048, *heads) | {'sinks': ((heads[0],), jnp.float32, ('tensor',))}
  assert compile_for(mesh, _step(mesh, **options), quick=True, **arguments)


def test_float32(make_tpu_mesh, compile_for):
  mesh = make_tpu_mesh('v5p')
  assert compile_for(mesh, _step(mesh), quick=True, **_arguments(1, 1024, 8, 2, 64, jnp.float32))


def test_xla_form_compiles_too(make_tpu_mesh, compile_for):
  mesh = make_tpu_mesh('v5e')
  step = _step(mesh, implementation='xla')
  assert compile_for(mesh, step, quick=True, **_arguments(1, 1024, 8, 2, 64))
