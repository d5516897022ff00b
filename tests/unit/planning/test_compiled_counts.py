"""Collectives and products of compiled programs against sums by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlax_stack.models.experts import ExpertKernels, mix, route
from rlax_stack.planning.compiled_counts import COLLECTIVES, CompiledCounts, count_compiled
from rlax_stack.planning.traced_flops import Counting, traced_flops
from rlax_stack.sharding import make_mesh

_WHOLE = PartitionSpec()


@pytest.fixture(scope='module')
def mesh():
  return make_mesh({'fsdp': 4}, jax.devices()[:4])


def _text(mesh, function, *arguments, out=_WHOLE):
  shapes = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    for shape, dtype, spec in arguments
  ]
  compiled = jax.jit(function, out_shardings=NamedSharding(mesh, out)).lower(*shapes).compile()
  return compiled.as_text()


def test_layers_gathered_in_a_loop(mesh):
  """Every layer's kernel lies on four devices and is gathered for rows that do, too."""
  rows, kernels = PartitionSpec('fsdp'), PartitionSpec(None, 'fsdp')

  def layers(x, kernels):
    def layer(x, w):
      whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec()))
      return jnp.tanh(x @ whole), None

    return jax.lax.scan(layer, x, kernels)[0]

  text = _text(
    mesh, layers, ((8, 64), jnp.float32, rows), ((6, 64, 64), jnp.float32, kernels), out=rows
  )
  counts = count_compiled(text)
  assert isinstance(counts, CompiledCounts) and set(counts.calls) == set(COLLECTIVES)
  assert counts.sent_bytes['all-gather'] == 6 * 64 * 64 * 4 * 3 / 4
  assert counts.product_flops == 6 * 2 * 2 * 64 * 64
  assert sum(counts.sent_bytes.values()) == counts.sent_bytes['all-gather']


def test_a_sum_over_devices(mesh):
  columns, rows = PartitionSpec(None, 'fsdp'), PartitionSpec('fsdp')
  text = _text(
    mesh, lambda x, w: x @ w, ((8, 64), jnp.float32, columns), ((64, 32), jnp.float32, rows)
  )
  counts = count_compiled(text)
  assert counts.calls['all-reduce'] == 1
  assert counts.sent_bytes['all-reduce'] == 2 * 8 * 32 * 4 * 3 / 4
  assert counts.product_flops == 2 * 8 * 16 * 32


def test_loops_of_unknown_length_run_as_often_as_is_said(mesh):
  whole = PartitionSpec()

  def micro_batches(x, w, count):
    return jax.lax.fori_loop(0, count, lambda i, x: x @ w, x)

  text = _text(
    mesh,
    micro_batches,
    ((8, 64), jnp.float32, whole),
    ((64, 64), jnp.float32, whole),
    ((), jnp.int32, whole),
  )
  assert (
    count_compiled(text, counting=Counting(unknown_trips=7)).product_flops == 7 * 2 * 8 * 64 * 64
  )


def test_what_a_tpu_program_says():
  """Lines as libtpu writes them: starts that hold their operand, groups by iota, products as convolutions."""
  text = """HloModule step

%body (p: (bf16[16,64])) -> (bf16[16,64]) {
  %p = bf16[16,64]{1,0} parameter(0)
  %w = bf16[64,32]{1,0} parameter(1)
  %ag = (bf16[4,64]{1,0}, bf16[16,64]{1,0}) all-gather-start(%p), replica_groups=[8,4]<=[32], dimensions={0}
  %done = bf16[16,64]{1,0} all-gather-done(%ag)
  %rs = f32[4,64]{1,0} reduce-scatter(%p), replica_groups=[8,4]<=[32], dimensions={0}, to_apply=%sum
  ROOT %dot = bf16[16,32]{1,0} convolution(%done, %w), dim_labels=bf_io->bf
}

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[16,64]) -> bf16[16,64] {
  %x = bf16[16,64]{1,0} parameter(0)
  %cp = bf16[16,64]{1,0} collective-permute(%x), source_target_pairs={{0,1}}
  %aa = bf16[16,64]{1,0} all-to-all(%x), replica_groups=mesh['a'=2,'b'=8] {'a','b':(2)4}, dimensions={0}
  ROOT %loop = (bf16[16,64]) while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}
"""
  counts = count_compiled(text)
  assert counts.sent_bytes['all-gather'] == 10 * 16 * 64 * 2 * 3 / 4
  assert counts.sent_bytes['reduce-scatter'] == 10 * 16 * 64 * 4 * 3 / 4
  assert counts.sent_bytes['collective-permute'] == 16 * 64 * 2
  assert counts.sent_bytes['all-to-all'] == 16 * 64 * 2 * 7 / 8
  assert counts.calls['all-gather'] == 10
  assert counts.product_flops == 10 * 2 * 16 * 64 * 32


def test_loops_of_a_tpu_program_say_how_often_in_their_condition():
  """A counter against a constant; a loop whose limit is given runs as often as the caller says."""
  text = """HloModule step

%layer (p: (s32[], bf16[16,64])) -> (s32[], bf16[16,64]) {
  %x = bf16[16,64]{1,0} parameter(0)
  ROOT %dot = bf16[16,64]{1,0} convolution(%x, %x), dim_labels=bf_oi->bf
}

%few (p: (s32[], bf16[16,64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(28), backend_config={"flag_configs":[]}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%body (p: (s32[], bf16[16,64])) -> (s32[], bf16[16,64]) {
  ROOT %inner = (s32[], bf16[16,64]) while(%p), condition=%few, body=%layer
}

%given (p: (s32[], bf16[16,64])) -> pred[] {
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[16,64]) -> bf16[16,64] {
  ROOT %loop = (s32[], bf16[16,64]) while(%x), condition=%given, body=%body
}
"""
  assert (
    count_compiled(text, counting=Counting(unknown_trips=5)).product_flops
    == 5 * 28 * 2 * 16 * 64 * 64
  )


@pytest.mark.parametrize(
  ('line', 'flops'),
  [
    # A product of 16 slices, each by its own: the window moves over padding, one tap meets the input.
    (
      '%c = bf16[8,16,4,1]{3,2,1,0} convolution(%l, %r), window={size=16x2 pad=15_15x0_0 rhs_reversal=1x0}, '
      'dim_labels=b1f0_0o1i->b0f1',
      2 * 8 * 16 * 4 * 32 * 2,
    ),
    # Two taps that are added, then two that are not.
    (
      '%c = bf16[8,4,1]{2,1,0} convolution(%l, %r), window={size=2}, dim_labels=b0f_0io->bf0',
      2 * 8 * 4 * 32 * 2,
    ),
    (
      '%c = bf16[8,2,4]{2,1,0} convolution(%l, %r), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=fb0_i0o->b0f',
      2 * 8 * 4 * 32 * 2,
    ),
    # Every second place of a stretched input.
    (
      '%c = bf16[8,4,4]{2,1,0} convolution(%l, %r), window={size=1 stride=1 lhs_dilate=2}, dim_labels=b0f_0io->b0f',
      2 * 8 * 4 * 32 * 2,
    ),
  ],
)
def test_padding_of_a_convolution_is_no_work(line, flops):
  shapes = {
    16: ('bf16[8,2,32,1]', 'bf16[16,4,2,32]'),
    2: ('bf16[8,2,32]', 'bf16[2,32,4]'),
    1: ('bf16[8,2,32]', 'bf16[1,32,4]'),
  }
  if 'fb0' in line:
    left, right = 'bf16[32,8,1]', 'bf16[32,2,4]'
  else:
    left, right = shapes[16 if '16x2' in line else 2 if 'size=2}' in line else 1]
  text = f"""HloModule step

ENTRY %main (l: bf16[1]) -> bf16[1] {{
  %l = {left}{{1,0}} parameter(0)
  %r = {right}{{1,0}} parameter(1)
  ROOT {line}
}}
"""
  assert count_compiled(text).product_flops == flops


def test_a_collective_done_in_parts_is_counted_once():
  text = """HloModule step

%start (a: bf16[4,64]) -> bf16[16,64] {
  %a = bf16[4,64]{1,0} parameter(0)
  ROOT %g = bf16[16,64]{1,0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}
}

%async_collective_fusion.7 (a: bf16[4,64]) -> bf16[16,64] {
  %a = bf16[4,64]{1,0} parameter(0)
  %w = bf16[64,32]{1,0} parameter(1)
  ROOT %g = bf16[16,64]{1,0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %dot = bf16[4,32]{1,0} convolution(%a, %w), dim_labels=bf_io->bf
}

%finish (a: bf16[4,64]) -> bf16[16,64] {
  %a = bf16[4,64]{1,0} parameter(0)
  ROOT %g = bf16[16,64]{1,0} all-gather(%a), replica_groups=[1,4]<=[4], dimensions={0}
}

ENTRY %main (x: bf16[4,64]) -> bf16[16,64] {
  %x = bf16[4,64]{1,0} parameter(0)
  %async-collective-start = bf16[16,64]{1,0} fusion(%x), kind=kCustom, calls=%start
  %fusion.7 = bf16[16,64]{1,0} fusion(%x), kind=kOutput, calls=%async_collective_fusion.7
  ROOT %async-collective-done = bf16[16,64]{1,0} fusion(%x), kind=kCustom, calls=%finish
}
"""
  counts = count_compiled(text)
  assert counts.calls['all-gather'] == 1
  assert counts.sent_bytes['all-gather'] == 16 * 64 * 2 * 3 / 4
  assert counts.product_flops == 2 * 4 * 64 * 32


def test_loops_over_blocks_of_experts_have_their_own_number():
  """Three products of a block forward, and six of gradients."""
  shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 8, 4), (6, 8, 4), (6, 4, 8))]
  x, router = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 4), (6, 4)))

  def loss(x, router, kernels):
    routing = route(x, router, experts_per_token=3, normalise=True)
    return jnp.sum(jnp.sin(mix(x, routing, kernels, form='blocks')))

  gradient = jax.grad(loss, argnums=(0, 1, 2))
  arguments = (x, router, ExpertKernels(*shapes))
  counting = Counting(unknown_trips=1000, block_trips=5)
  router_flops, block_flops = 3 * 2 * 64 * 4 * 6, 9 * 2 * 32 * 4 * 8  # blocks of 32 slots
  text = jax.jit(gradient).lower(*arguments).compile().as_text()
  got = count_compiled(text, counting=counting).product_flops
  assert got == router_flops + 5 * block_flops
  assert traced_flops(gradient, *arguments, counting=counting) == got


def test_a_sum_that_is_scattered_is_sent_half():
  text = """HloModule step

%all-reduce-scatter.3 (a: bf16[16,64]) -> bf16[4,64] {
  %a = bf16[16,64]{1,0} parameter(0)
  %r = bf16[16,64]{1,0} all-reduce(%a), replica_groups=[1,4]<=[4], to_apply=%sum
  ROOT %s = bf16[4,64]{1,0} dynamic-slice(%r, %a, %a), dynamic_slice_sizes={4,64}
}

ENTRY %main (x: bf16[16,64]) -> bf16[4,64] {
  %x = bf16[16,64]{1,0} parameter(0)
  ROOT %f = bf16[4,64]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
}
"""
  counts = count_compiled(text)
  assert counts.calls['reduce-scatter'] == 1 and counts.calls['all-reduce'] == 0
  assert counts.sent_bytes['reduce-scatter'] == 16 * 64 * 2 * 3 / 4
