"""Rows whose tokens lie over several devices: the same update, and no device with the hidden states of a whole row."""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.learner import packing
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_parts import in_parts, in_rows, target_states
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings, target_log_probs
from rlax_stack.models import decoder
from rlax_stack.sharding import make_mesh, param_shardings, sharding_for

_PLAN = RowPlan(shape=RowShape(256, 128), micro_batch_rows=2, max_micro_batches=1)
_SETTINGS = ForwardSettings(compute_dtype=jnp.float32, remat='layer')


@pytest.fixture(scope='module')
def groups(make_groups):
  return make_groups(sizes=(7, 6, 8, 5, 4, 6), prompt_lengths=(30, 41, 52, 45, 60, 33))


def _mesh(**sizes):
  return make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])


def _update(learner, groups):
  metrics = learner.train(groups).result()
  moments = [x for x in jax.tree.leaves(learner.state.opt_state) if x.ndim]
  return metrics, [np.asarray(x) for x in moments[: len(moments) // 2]]


@pytest.fixture(scope='module')
def want(make_learner, groups):
  return _update(make_learner(rows=_PLAN), groups)


@pytest.mark.parametrize(
  'mesh', [{'fsdp': 2, 'context': 2, 'tensor': 2}, {'data': 2, 'context': 4}], ids=str
)
def test_update_does_not_depend_on_the_split_of_rows(mesh, make_learner, groups, want):
  got = _update(make_learner(rows=_PLAN, mesh=mesh), groups)
  for name in ('loss', 'grad_norm', 'entropy', 'trained_tokens', 'kl_behaviour'):
    np.testing.assert_allclose(got[0][name], want[0][name], rtol=2e-5, atol=1e-7, err_msg=name)
  for a, b in zip(got[1], want[1], strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * np.abs(b).max() + 1e-9)


def _pack(groups, plan=_PLAN, **options):
  advantages = [np.ones(len(g.trajectories), np.float32) for g in groups]
  shapes = {'row_shapes': [plan.shape], 'rows_multiple': plan.micro_batch_rows}
  return packing.pack_groups(groups, advantages, **shapes, **options)


def test_subtrees_cross_the_borders_of_devices(groups):
  ends, index = np.asarray(_pack(groups).subtree_end), np.arange(256)
  crossing = [((index < border) & (ends > border)).sum() for border in (64, 128, 192)]
  assert min(crossing) > 20, crossing


def _score(config, mesh, settings=_SETTINGS):
  """Jitted function (params, rows) -> a number of all log-probs and entropies, and its gradient."""

  def number(params, rows):
    scored = target_log_probs(params, config, rows, settings, mesh)
    weights = 1 + 0.5 * jnp.cos(jnp.arange(rows.target_t.size, dtype=jnp.float32))
    both = scored.log_prob + 0.3 * scored.entropy
    return jnp.vdot(both.reshape(-1), weights) / 100

  return jax.jit(jax.value_and_grad(number))


def _placed(params, rows, mesh):
  rows = jax.device_put(rows, sharding_for(mesh, ('rows',)))
  return jax.device_put(params, param_shardings(params, mesh)), rows


def _assert_same(got, want):
  np.testing.assert_allclose(got[0], want[0], rtol=2e-5)
  for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * np.abs(b).max() + 1e-9)


@pytest.mark.slow
def test_no_device_gathers_keys_or_hidden_states(tiny, tiny_params, groups):
  rows, mesh = _pack(groups), _mesh(context=4)
  args = _placed(tiny_params, rows, mesh)
  compiled = _score(tiny, mesh).lower(*args).compile()
  _assert_same(compiled(*args), _score(tiny, None)(tiny_params, jax.tree.map(jnp.asarray, rows)))
  moved = re.findall(
    r'= \(?f32\[([\d,]*)\][^=]*? (all-gather|all-to-all|collective-permute)(?:-start)?\(',
    compiled.as_text(),
  )
  assert any(kind == 'collective-permute' for _, kind in moved)
  # Weights are whole here, so nothing but rows could be gathered: a quarter of keys or states at most moves at once.
  most = rows.tokens.size // 4 * tiny.hidden_size
  for shape, kind in moved:
    assert np.prod([int(n) for n in shape.split(',') if n]) <= most, (shape, kind)


@pytest.mark.slow
def test_experts_and_kept_sets_over_context(tiny, groups):
  config = dataclasses.replace(tiny, num_experts=4, experts_per_token=2, moe_intermediate_size=16)
  rng, mesh = np.random.default_rng(1), _mesh(expert=2, context=2)
  params = jax.tree.map(
    lambda leaf: (0.4 * rng.standard_normal(leaf.shape)).astype(np.float32),
    decoder.abstract_params(config),
  )
  plan = RowPlan(shape=RowShape(128, 64), micro_batch_rows=2, max_micro_batches=1)
  rows = _pack(groups[:2], plan)
  kept = rng.integers(0, config.vocab_size, (*rows.target_t.shape, 3)).astype(np.int32)
  kept[..., 0] = rows.target_t
  kept[rng.random(rows.target_t.shape) < 0.3] = -1
  rows = rows._replace(kept_ids_t=kept)
  got = _score(config, mesh)(*_placed(params, rows, mesh))
  _assert_same(got, _score(config, None)(params, jax.tree.map(jnp.asarray, rows)))


def test_states_of_targets_come_from_the_devices_that_hold_them():
  rng, mesh = np.random.default_rng(2), _mesh(fsdp=2, context=4)
  hidden = rng.standard_normal((2, 64, 8)).astype(np.float32)
  index = rng.integers(0, 64, (2, 12)).astype(np.int32)
  weights = rng.standard_normal((2, 12, 8)).astype(np.float32)

  @jax.jit
  def both(hidden):
    found, pull_back = jax.vjp(lambda x: target_states(x, index, mesh), hidden)
    return found, pull_back(jnp.asarray(weights))[0]

  found, gradient = both(hidden)
  want = np.zeros_like(hidden)
  for row in range(2):
    np.testing.assert_array_equal(found[row], hidden[row, index[row]])
    np.add.at(want[row], index[row], weights[row])
  assert found.sharding.spec[1] == 'context'
  np.testing.assert_allclose(gradient, want, atol=1e-6)


def test_parts_of_rows_stay_where_they_are():
  mesh = _mesh(fsdp=2, context=4)
  x = np.arange(4 * 12 * 3).reshape(4, 12, 3).astype(np.int32)
  placed = jax.device_put(x, sharding_for(mesh, ('rows', 'tokens', None)))
  split = jax.jit(lambda x: in_parts(x, mesh)).lower({'a': placed}).compile()
  parts = split({'a': placed})['a']
  # Two rows to a device: first all of them for the first device, which has a quarter of their tokens.
  want = x.reshape(2, 2, 4, 3, 3).transpose(0, 2, 1, 3, 4).reshape(16, 3, 3)
  np.testing.assert_array_equal(parts, want)
  assert [shard.data.shape for shard in parts.addressable_shards] == [(2, 3, 3)] * 8
  joined = jax.jit(lambda x: in_rows(x, mesh)).lower(parts).compile()
  np.testing.assert_array_equal(joined(parts), x)
  for program in (split, joined):
    assert not re.search('all-gather|all-to-all|collective-permute|all-reduce', program.as_text())
  assert in_parts(x, None) is x and in_rows(x, _mesh(fsdp=2)) is x


def test_targets_that_do_not_divide_are_refused():
  hidden, index = jnp.zeros((1, 64, 8)), jnp.zeros((1, 10), jnp.int32)
  with pytest.raises(ConfigError, match='10 targets .*context = 4.*leaves room for 12'):
    target_states(hidden, index, _mesh(context=4))


_ON_SIXTEEN = """
import sys
sys.path.insert(0, sys.argv[1])
import jax, numpy as np
import test_context as t
assert jax.device_count() == 16
from conftest import _groups, ModelConfig
config = ModelConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
                     head_dim=8)
rng = np.random.default_rng(3)
params = jax.tree.map(lambda x: (0.4 * rng.standard_normal(x.shape)).astype(np.float32),
                      t.decoder.abstract_params(config))
groups = _groups(config, sizes=(7, 6, 8, 5, 4, 6), prompt_lengths=(30, 41, 52, 45, 60, 33))
rows, mesh = t._pack(groups), t._mesh(fsdp=2, context=4, tensor=2)
got = t._score(config, mesh)(*t._placed(params, rows, mesh))
t._assert_same(got, t._score(config, None)(params, jax.tree.map(t.jnp.asarray, rows)))
"""


def test_sixteen_devices_equal_one():
  flags = '--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0'
  subprocess.run(
    [sys.executable, '-c', _ON_SIXTEEN, os.path.dirname(__file__)],
    env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    check=True,
    timeout=120,
  )
