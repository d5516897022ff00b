"""No policy changes a gradient, and each keeps what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.remat import REMAT_POLICIES, check_offload, named_input, remat_policy
from rlax_stack.pallas_kernels.saved_names import ATTENTION, named_attention
from rlax_stack.pallas_kernels.tree_attention import AttentionShape, prepare_tree_attention
from rlax_stack.planning.traced_flops import traced_flops
from rlax_stack.sharding import make_mesh, param_shardings, sharding_for

_CONFIG = ModelConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
)
_SHAPE = AttentionShape(4, 2, 8, jnp.float32)


def _loss(params, tokens, remat, mesh=None):
  places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
  ends = np.full_like(places, tokens.shape[1])
  attend = prepare_tree_attention(places, ends, shape=_SHAPE, implementation='xla', mesh=mesh)
  hidden = decoder.hidden_states(params, _CONFIG, tokens, places, attend, remat=remat)
  return jnp.sum(jnp.square(hidden[:, ::3]))


def _gradient(remat, mesh=None):
  return jax.grad(lambda params, tokens: _loss(params, tokens, remat, mesh))


@pytest.fixture(scope='module')
def given():
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: (0.4 * rng.standard_normal(x.shape) + (x.ndim == 1)).astype(np.float32),
    decoder.abstract_params(_CONFIG),
  )
  return params, rng.integers(0, 32, (4, 16)).astype(np.int32)


@pytest.fixture(scope='module')
def want(given):
  return jax.jit(_gradient('none'))(*given)


def _assert_close(got, want):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize('remat', sorted(set(REMAT_POLICIES) - {'none', 'offload_attention'}))
def test_no_policy_changes_the_gradient(remat, given, want):
  _assert_close(jax.jit(_gradient(remat))(*given), want)


def test_nor_on_a_mesh(given, want):
  mesh = make_mesh({'data': 2, 'fsdp': 2, 'tensor': 2})
  params, tokens = given
  places = param_shardings(params, mesh), sharding_for(mesh, ('rows', None))
  step = jax.jit(_gradient('offload_attention', mesh), in_shardings=places, out_shardings=places[0])
  _assert_close(step(params, tokens), want)


def test_what_is_kept_is_not_computed_again(given):
  flops = {name: traced_flops(_gradient(name), *given) for name in REMAT_POLICIES}
  forward = traced_flops(lambda p, t: _loss(p, t, 'none'), *given)
  products = 2.0 * 2 * 64 * (16 * 32 * 2 + 16 * 16 * 2 + 3 * 16 * 32)
  attention = forward - products  # each loop counted once, in both
  assert attention > 0
  last = 2.0 * 2 * 64 * 16 * 32  # nothing of the backward pass reads what down_proj gives
  assert flops['layer'] - flops['none'] == pytest.approx(forward - last)
  assert flops['layer'] - flops['attention'] == pytest.approx(attention)
  assert flops['dots'] - flops['dots_attention'] == pytest.approx(attention)
  assert flops['dots_attention'] == flops['none']
  for name in ('layer', 'attention', 'dots'):
    assert flops[f'offload_{name}'] == flops[name]


class _Memory:
  kind = 'device'


class _Device:
  device_kind = 'Abacus'

  def addressable_memories(self):
    return [_Memory()]


def test_refusals():
  with pytest.raises(ConfigError, match="unknown remat 'layers'. Did you mean layer?"):
    remat_policy('layers')
  with pytest.raises(ConfigError, match='pinned_host memory, which Abacus lacks: it has device'):
    check_offload('offload_layer', _Device())
  check_offload('layer', _Device())
  check_offload('offload_layer', jax.devices()[0])


def test_names_are_of_no_consequence_by_themselves():
  x = jnp.arange(3.0)
  assert ATTENTION and named_input(x) is not None
  for got in (named_input(x), *named_attention(x, x)):
    np.testing.assert_array_equal(got, x)
