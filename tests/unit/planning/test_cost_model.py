"""The cost model against sums by hand and against the shapes of the real trees."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models import decoder
from rlax_stack.models.load import resolve_model_path
from rlax_stack.models.shapes import SHAPES, known_shape
from rlax_stack.planning import cost_model
from rlax_stack.planning.compiled_counts import COLLECTIVES, CompiledCounts
from rlax_stack.planning.cost_model import EngineBytes, Lengths, StepTime
from rlax_stack.planning.learner_programs import ProgramFigures
from rlax_stack.planning.topologies import KINDS, DeviceKind
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig, empty_state

_KIND = DeviceKind(hbm_bytes=1e9, matmul_flops=1e12, hbm_bytes_s=1e11, link_bytes_s=1e10)
_SMALL = dataclasses.replace(SHAPES['smollm2_135m'], num_layers=2, vocab_size=1000)


@pytest.mark.parametrize(
  ('name', 'billions'),
  [
    ('qwen3_0p6b', 0.596),
    ('qwen3_8b', 8.19),
    ('qwen3_32b', 32.76),
    ('llama3_8b', 8.03),
    ('llama3_70b', 70.55),
  ],
)
def test_known_shapes_have_the_numbers_that_their_names_say(name, billions):
  config = known_shape(f'shape:{name}')
  assert cost_model.num_parameters(config) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
  ('name', 'layers', 'hidden', 'attention', 'norms', 'experts', 'width', 'taken', 'vocabulary'),
  [
    # q and o of 32 heads, k and v of 4; Qwen3 norms q and k.
    ('qwen3-30b-a3b', 48, 2048, 72 * 128, 2 * 2048 + 256, 128, 768, 8, 151936),
    ('qwen3_235b_a22b', 94, 4096, 136 * 128, 2 * 4096 + 256, 128, 1536, 8, 151936),
    ('mixtral-8x7b', 32, 4096, 80 * 128, 2 * 4096, 8, 14336, 2, 32000),
    ('mixtral_8x22b', 56, 6144, 112 * 128, 2 * 6144, 8, 16384, 2, 32000),
  ],
)
def test_mixtures_have_the_numbers_and_the_work_of_their_names(
  name, layers, hidden, attention, norms, experts, width, taken, vocabulary
):
  config = known_shape(f'shape:{name}')
  expert, rest = 3 * hidden * width, hidden * attention + experts * hidden + norms
  ends = 2 * vocabulary * hidden + hidden
  assert cost_model.num_parameters(config) == layers * (experts * expert + rest) + ends
  assert cost_model.active_parameters(config) == layers * (taken * expert + rest) + ends
  billions = {'30b': (30.53, 3.35), '235b': (235.1, 22.2), '8x7b': (46.70, 12.88)}
  whole, active = billions.get(name.replace('_', '-').split('-')[1], (140.6, 39.15))
  assert cost_model.num_parameters(config) / 1e9 == pytest.approx(whole, rel=2e-3)
  assert cost_model.active_parameters(config) / 1e9 == pytest.approx(active, rel=5e-3)
  # Every number of a layer but those of its norms is multiplied once for every token.
  products = layers * (taken * expert + rest - norms)
  got = cost_model.model_flops(config, tokens=7, targets=3, pairs=0.0, backward=False)
  assert got == 2 * 7 * products + 2 * 3 * vocabulary * hidden


def test_a_dense_model_uses_all_of_itself():
  config = SHAPES['qwen3_8b']
  assert cost_model.active_parameters(config) == cost_model.num_parameters(config)


@pytest.mark.parametrize('name', SHAPES)
def test_numbers_are_those_of_the_tree(name):
  leaves = jax.tree.leaves(decoder.abstract_params(SHAPES[name]))
  assert cost_model.num_parameters(SHAPES[name]) == sum(math.prod(x.shape) for x in leaves)


def test_a_shape_is_no_model_and_an_unknown_one_is_refused():
  with pytest.raises(ModelFileError, match='no such shape. There are smollm2_135m, qwen3_0p6b'):
    known_shape('shape:qwen9')
  with pytest.raises(ModelFileError, match='it has no weights. Give a .gguf'):
    resolve_model_path('shape:qwen3_8b')


def test_flops_that_are_needed():
  config, tokens, targets, pairs = _SMALL, 10, 4, 30.0
  attention = 576 * 64 * (9 + 3 + 3 + 9)
  forward = 2 * 10 * 2 * (attention + 3 * 576 * 1536) + 2 * 4 * 1000 * 576
  forward += 2 * 30 * 9 * 2 * 2 * 64  # two layers; scores and values, 64 products and sums each
  got = cost_model.model_flops(config, tokens=tokens, targets=targets, pairs=pairs, backward=False)
  assert got == forward
  assert cost_model.model_flops(config, tokens=tokens, targets=targets, pairs=pairs) == 3 * forward


def test_a_step_lies_between_its_bounds():
  sent = dict.fromkeys(COLLECTIVES, 0.0) | {'all-gather': 3e9, 'all-reduce': 1e9}
  counts = CompiledCounts(calls={}, sent_bytes=sent, product_flops=0.0)
  figures = ProgramFigures(
    flops=8e12, argument_bytes=0.0, temporary_bytes=0.0, counts=counts, compile_s=0.0
  )
  found = cost_model.step_time(figures, _KIND, 4)
  assert found == StepTime(compute_s=2.0, send_s=0.4)
  assert (found.serial_s, found.overlapped_s) == (2.4, 2.0)


@pytest.mark.parametrize('kv', ['same', 'int8'])
@pytest.mark.parametrize('weights', ['same', 'int8'])
def test_an_engine_holds_what_it_allocates(weights, kv):
  sizes = EngineConfig(
    slots=4,
    max_prompt_tokens=64,
    max_new_tokens=32,
    compute_dtype=jnp.float32,
    weights=weights,
    kv=kv,
  )
  got = cost_model.engine_bytes(_SMALL, sizes, 4)
  assert isinstance(got, EngineBytes) and got.total > got.weights
  state = jax.eval_shape(lambda: empty_state(_SMALL, sizes))

  def held(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

  assert got.prefix_kv == pytest.approx(held((state.prefix_k, state.prefix_v)))
  assert got.suffix_kv == pytest.approx(held((state.suffix_k, state.suffix_v)))
  assert got.logits == held(state.prefix_logits)
  params = decoder.init_params(_SMALL, jax.random.key(0))
  served = Engine(_SMALL, sizes, join_kernels=False).load_params(params)
  # Scales of weights, one per output, are left out: they are a few in a thousand.
  assert got.weights == pytest.approx(held(served), rel=0.02)


def test_an_engine_of_a_mixture_reads_those_that_are_taken():
  config = dataclasses.replace(
    _SMALL, num_experts=16, experts_per_token=2, moe_intermediate_size=96
  )
  sizes = EngineConfig(
    slots=4, max_prompt_tokens=64, max_new_tokens=32, compute_dtype=jnp.float32, rows_per_block=4
  )
  params = decoder.init_params(config, jax.random.key(0))
  served = Engine(config, sizes, join_kernels=False).load_params(params)
  held = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(served))
  assert cost_model.engine_bytes(config, sizes, 4).weights == held
  # Four rows of two experts each: one of sixteen stays idle with a chance of (7/8)^4.
  experts = 2 * 16 * 3 * 576 * 96
  rest = cost_model.num_parameters(config) - experts - 1000 * 576
  token = 2 * 2 * 3 * 64 * 4
  read = 4 * (rest + experts * (1 - 0.875**4) + 1000 * 576) + token * (64 + 4 * 16)
  half = Lengths(mean=32.0)
  got = cost_model.decode_step_s(config, sizes, _KIND, group_size=4, itemsize=4, lengths=half)
  assert got == pytest.approx(read / 1e11)


def test_a_decode_step_reads_weights_and_kv_once():
  sizes = EngineConfig(
    slots=8, max_prompt_tokens=64, max_new_tokens=32, rows_per_block=4, compute_dtype=jnp.bfloat16
  )
  token = 2 * 2 * 3 * 64 * 2  # keys and values of two layers, three heads, in bfloat16
  layers = cost_model.num_parameters(_SMALL) - 1000 * 576
  read = 2 * layers + 2 * 1000 * 576 + token * (2 * 64 + 8 * 16)
  half = Lengths(mean=32.0)
  got = cost_model.decode_step_s(_SMALL, sizes, _KIND, group_size=4, itemsize=2, lengths=half)
  assert got == pytest.approx(read / 1e11)


def test_kinds_are_of_this_world():
  for kind in KINDS.values():
    assert 10e9 < kind.hbm_bytes < 300e9 and 1e14 < kind.matmul_flops < 5e15
    # Products of a matrix that is read once wait for memory below a few hundred rows.
    assert 100 < kind.matmul_flops / kind.hbm_bytes_s < 700


def test_spread_lengths_are_seen_by_their_longest():
  """Against the mean over every step of every sample."""
  assert Lengths(mean=100.0).seen == 50.0
  sigma = np.log(8.0) / (2 * 1.6449)
  lengths = np.random.default_rng(0).lognormal(np.log(1000) - sigma**2 / 2, sigma, 400_000)
  own = (lengths**2 / 2).sum() / lengths.sum()
  assert Lengths(mean=1000.0, spread=8.0).seen == pytest.approx(own, rel=0.02)
