"""Sparse MLPs: a router sends each token through a few of many experts (Mixtral, Qwen3-MoE).

No expert has a capacity: every token gets all the experts that it chose, and what it gets depends on no other
token. The choices (token, j-th expert) are laid side by side by expert, in slots, and multiplied there, so that work
grows with the choices and not with the experts. On a TPU that is one `jax.lax.ragged_dot` a kernel. Elsewhere
`ragged_dot` multiplies every slot by every expert; there blocks of slots of one expert pass one after another.

Not for losses of the router (objectives/router.py). Invariant: a mesh changes where a choice is computed, not its value
but for the order of sums over the axes `tensor` and `expert`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from rlax_stack import sharding
from rlax_stack.models.config import ModelConfig
from rlax_stack.pallas_kernels import dispatch

LOOP = 'expert_blocks'  # scope of the loops over blocks, by which a planner knows them
_FORMS = ('auto', 'blocks', 'ragged')
_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 128  # slots of one product


class Routing(NamedTuple):
  """Where each token goes; the leading axes are those of the hidden states."""

  logits: jax.Array  # float32 [..., E]
  experts: jax.Array  # int32 [..., k], the likeliest first
  weights: jax.Array  # float32 [..., k]


class ExpertKernels(NamedTuple):
  """Kernels [experts, out, in] of every expert; stacked layers lie one after another on the first axis."""

  gate: jax.Array
  up: jax.Array
  down: jax.Array


class ExpertLinear(nnx.Module):
  """The kernels [E, out, in] of one projection of every expert."""

  def __init__(self, experts: int, in_size: int, out_size: int, *, rngs: nnx.Rngs):
    shape = (experts, out_size, in_size)
    drawn = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape)
    self.kernel = nnx.Param(in_size**-0.5 * drawn)


def apply_mixture(
  config: ModelConfig,
  x: jax.Array,
  router: jax.Array,
  kernels: ExpertKernels,
  *,
  first: jax.Array | int = 0,
  mesh: Mesh | None = None,
  replay: jax.Array | None = None,
) -> tuple[jax.Array, Routing]:
  """What the mixture of a layer makes of hidden states [..., D], and where it sent them; see `route` and `mix`."""
  k, normalise = config.experts_per_token, config.norm_topk_prob
  routing = route(x, router, experts_per_token=k, normalise=normalise, replay=replay)
  return mix(x, routing, kernels, first=first, mesh=mesh), routing


def route(
  x: jax.Array,
  router: jax.Array,
  *,
  experts_per_token: int,
  normalise: bool,
  replay: jax.Array | None = None,
) -> Routing:
  """The k likeliest experts of each token, softmax in float32 over all experts.

  Mixtral and Qwen3-MoE share the formula; Mixtral always normalises. With `replay` a token goes where it went before,
  whatever is likeliest now, with the weights of now, through which gradients flow ("R3", Ma et al.,
  https://arxiv.org/abs/2510.11370).

  Args:
    x: hidden states [..., D].
    router: kernel [E, D].
    experts_per_token: k.
    normalise: whether the k weights are divided by their sum.
    replay: int [..., k], experts of each token; -1 where a token is free.
  """
  flat, experts = x.reshape(-1, x.shape[-1]), router.shape[0]
  logits = lax.dot_general(
    router.astype(x.dtype), flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  logits = logits.T.reshape(*x.shape[:-1], experts)
  probs = jax.nn.softmax(logits, axis=-1)
  weights, chosen = lax.top_k(probs, experts_per_token)
  if replay is not None:
    chosen = jnp.where(replay >= 0, replay.astype(chosen.dtype), chosen)
    weights = jnp.take_along_axis(probs, chosen, axis=-1)
  if normalise:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return Routing(logits, chosen, weights)


def mix(
  x: jax.Array,
  routing: Routing,
  kernels: ExpertKernels,
  *,
  first: jax.Array | int = 0,
  mesh: Mesh | None = None,
  form: str = 'auto',
) -> jax.Array:
  """Σⱼ wⱼ downₑ(silu(gateₑ x) · upₑ x) over the experts e = e(j) of each token; the sum in float32.

  Args:
    x: hidden states [..., D], or [R, T, D] on a mesh of several devices.
    routing: from `route`.
    kernels: cast to the dtype of x.
    first: place of expert 0 in the kernels.
    mesh: splits rows over data, fsdp, expert and context, the width of an expert over tensor and experts over expert.
    form: 'blocks', 'ragged', or 'auto' for what suits the device.

  Returns: [..., D] in the dtype of x.

  Raises:
    ValueError: an unknown form.
  """
  if form not in _FORMS:
    raise ValueError(f'unknown {form=}. Choose from {", ".join(_FORMS)}.')
  if form == 'auto':
    form = 'ragged' if dispatch.target_device(mesh).platform == 'tpu' else 'blocks'
  kernels = ExpertKernels(*(kernel.astype(x.dtype) for kernel in kernels))
  one = functools.partial(_mix, form=form)
  if mesh is None or mesh.size == 1:
    mixed = one(x, routing.weights, routing.experts, kernels, first, routing.logits.shape[-1])
  else:
    mixed = _mix_sharded(one, x, routing, kernels, mesh)
  return mixed.astype(x.dtype)


def _mix_sharded(one, x, routing, kernels, mesh) -> jax.Array:
  """`_mix` under shard_map: a device takes the rows of all along `expert` through the experts that it holds.

  The sums of a row return to the device that has it.
  """
  rules = sharding.DEFAULT_RULES
  by_row: PartitionSpec = rules.spec_for(('row_parts', None, 'features'))
  wide: Any = rules.spec_for(('experts', 'mlp', 'embed'))
  narrow: Any = rules.spec_for(('experts', 'embed', 'mlp'))
  (split,) = rules.mesh_axes('embed')

  def part(x, weights, experts, kernels):
    x, weights, experts = (
      lax.all_gather(rows, 'expert', axis=0, tiled=True) for rows in (x, weights, experts)
    )
    # Cast before they are gathered; their gradients are summed and scattered on the way back.
    kernels = ExpertKernels(
      gate=lax.all_gather(kernels.gate, split, axis=2, tiled=True),
      up=lax.all_gather(kernels.up, split, axis=2, tiled=True),
      down=lax.all_gather(kernels.down, split, axis=1, tiled=True),
    )
    held = kernels.gate.shape[0]
    experts = experts - held * lax.axis_index('expert').astype(experts.dtype)
    mixed = lax.psum(one(x, weights, experts, kernels, 0, held), 'tensor')
    return lax.psum_scatter(mixed, 'expert', scatter_dimension=0, tiled=True)

  # Loop carries start as constants, which vary over no axis.
  return jax.shard_map(
    part,
    mesh=mesh,
    in_specs=(by_row, by_row, by_row, ExpertKernels(wide, wide, narrow)),
    out_specs=by_row,
    check_vma=False,
  )(x, routing.weights, routing.experts, kernels)


def _mix(x, weights, experts, kernels, first, num_experts, *, form) -> jax.Array:
  """`mix` on one device, float32; choices of experts outside [0, num_experts) count 0."""
  shape, k = x.shape, experts.shape[-1]
  x, choices = x.reshape(-1, shape[-1]), experts.reshape(-1)
  block = 1 if form == 'ragged' else block_size(choices.size, num_experts)
  plan = _plan(choices, num_experts, block)
  spread = jnp.broadcast_to(x[:, None], (x.shape[0], k, x.shape[1])).reshape(-1, x.shape[1])
  slots = _moved(spread, plan.choice_of, plan.slot_of)
  product = _ragged_product if form == 'ragged' else functools.partial(_block_product, block)
  hidden = _gated(
    product(slots, kernels.gate, plan, first), product(slots, kernels.up, plan, first)
  )
  made = _moved(product(hidden, kernels.down, plan, first), plan.slot_of, plan.choice_of)
  weighted = weights.reshape(-1, k, 1) * made.reshape(-1, k, x.shape[1]).astype(jnp.float32)
  return jnp.sum(weighted, axis=1).reshape(shape)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
  return jax.nn.silu(gate) * up


class _Plan(NamedTuple):
  """Slots of A choices: those of an expert lie side by side, from a multiple of the block on."""

  slot_of: jax.Array  # int32 [A], number of slots where the choice is not computed here
  choice_of: jax.Array  # int32 [slots], A where the slot is empty
  sizes: jax.Array  # int32 [E], slots of each expert, multiples of the block
  owner: jax.Array  # int32 [blocks], the expert of each block
  used: jax.Array  # int32 scalar, blocks in use: the first ones


def block_size(choices: int, num_experts: int) -> int:
  """A power of two near the choices of an expert: larger blocks stay empty, smaller ones read kernels again."""
  mean = max(1, choices // num_experts)
  return min(max(1 << (mean - 1).bit_length(), _SMALLEST_BLOCK), _LARGEST_BLOCK)


def _plan(choices: jax.Array, num_experts: int, block: int) -> _Plan:
  count = choices.size
  # What choices leave empty in the last block of every expert that has one.
  blocks = min(count, (count + min(num_experts, count) * (block - 1)) // block)
  slots = blocks * block
  here = (choices >= 0) & (choices < num_experts)
  choices = jnp.where(here, choices, num_experts)
  order = jnp.argsort(choices, stable=True).astype(jnp.int32)
  ordered = choices[order]
  experts = jnp.arange(num_experts, dtype=choices.dtype)
  counts = jnp.sum((choices[:, None] == experts[None, :]).astype(jnp.int32), axis=0)
  sizes = (counts + (block - 1)) // block * block
  ends = jnp.cumsum(sizes)
  shift = (ends - sizes) - (
    jnp.cumsum(counts) - counts
  )  # of an expert's first slot and first choice
  place = jnp.arange(count, dtype=jnp.int32) + shift.at[ordered].get(mode='fill', fill_value=0)
  place = jnp.where(ordered < num_experts, place, slots).astype(jnp.int32)
  starts = jnp.arange(blocks, dtype=jnp.int32) * block
  owner = jnp.sum((starts[:, None] >= ends[None, :]).astype(jnp.int32), axis=1)
  return _Plan(
    slot_of=jnp.zeros(count, jnp.int32).at[order].set(place, unique_indices=True),
    choice_of=jnp.full(slots, count, jnp.int32).at[place].set(order, mode='drop'),
    sizes=sizes.astype(jnp.int32),
    owner=jnp.minimum(owner, num_experts - 1),
    used=(ends[-1] // block).astype(jnp.int32),
  )


@jax.custom_vjp
def _moved(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
  """Line i is line source[i] of x, and `target` the way back; zeros where an index is past the end."""
  del target
  return x.at[source].get(mode='fill', fill_value=0)


def _moved_forward(x, source, target):
  return _moved(x, source, target), target


def _moved_backward(target, gradient):
  # A gather both ways: a scatter-add would be slower, and on a GPU not the same twice.
  return gradient.at[target].get(mode='fill', fill_value=0), None, None


_moved.defvjp(_moved_forward, _moved_backward)


def _ragged_product(slots, kernel, plan, first) -> jax.Array:
  """Each slot [in] times the kernel of its expert -> [slots, out]."""
  held = lax.dynamic_slice_in_dim(kernel, first, plan.sizes.shape[0])
  held = with_layout_constraint(held, Layout((0, 1, 2)))
  return lax.ragged_dot(slots, held.swapaxes(1, 2), plan.sizes)


def _block_product(block, slots, kernel, plan, first) -> jax.Array:
  """As `_ragged_product`, one block of slots after another; as many products as there are blocks in use."""
  return _product(block, slots, kernel, plan.owner + first, plan.used)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(block, slots, kernel, owner, used) -> jax.Array:
  def body(i, out):
    lines = lax.dynamic_slice_in_dim(slots, i * block, block)
    held = lax.dynamic_index_in_dim(kernel, owner[i], keepdims=False)
    # Columns, as everywhere in decode: a column's result does not depend on where it stands.
    made = lax.dot_general(held, lines, (((1,), (1,)), ((), ())))
    return lax.dynamic_update_slice_in_dim(out, made.T, i * block, axis=0)

  empty = jnp.zeros((slots.shape[0], kernel.shape[1]), slots.dtype)
  with jax.named_scope(LOOP):
    return lax.fori_loop(0, used, body, empty)


def _product_forward(block, slots, kernel, owner, used):
  return _product(block, slots, kernel, owner, used), (slots, kernel, owner, used)


def _product_backward(block, kept, gradient):
  slots, kernel, owner, used = kept

  def body(i, totals):
    of_slots, of_kernel = totals
    lines = lax.dynamic_slice_in_dim(slots, i * block, block)
    above = lax.dynamic_slice_in_dim(gradient, i * block, block)
    held = lax.dynamic_index_in_dim(kernel, owner[i], keepdims=False)
    below = lax.dot_general(above, held, (((1,), (0,)), ((), ())))
    share = lax.dot_general(
      above, lines, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    of_slots = lax.dynamic_update_slice_in_dim(of_slots, below, i * block, axis=0)
    # A slice taken and put back, which is done in place.
    sofar = lax.dynamic_index_in_dim(of_kernel, owner[i], keepdims=False)
    of_kernel = lax.dynamic_update_index_in_dim(of_kernel, sofar + share, owner[i], axis=0)
    return of_slots, of_kernel

  zeros = jnp.zeros_like(slots), jnp.zeros(kernel.shape, jnp.float32)
  with jax.named_scope(LOOP):
    of_slots, of_kernel = lax.fori_loop(0, used, body, zeros)
  return of_slots, of_kernel.astype(kernel.dtype), None, None


_product.defvjp(_product_forward, _product_backward)
