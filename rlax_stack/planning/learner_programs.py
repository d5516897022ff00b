"""The learner's own programs, compiled for a described machine without any array: what they hold and do on one
device.
"""

import dataclasses
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.errors import ConfigError
from rlax_stack.learner import critic as critics
from rlax_stack.learner.optimizer import make_optimizer
from rlax_stack.learner.packing import empty_batch
from rlax_stack.learner.scoring import make_proximal_score, make_score, rows_sharding, weight_shapes
from rlax_stack.learner.settings import LearnerSettings
from rlax_stack.learner.state import LearnerState, abstract_state
from rlax_stack.learner.train_step import make_train_step
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.experts import block_size
from rlax_stack.planning.compiled_counts import CompiledCounts, count_compiled
from rlax_stack.planning.traced_flops import Counting, traced_flops
from rlax_stack.sharding import param_shardings, row_shards
from rlax_stack.types import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramFigures:
  """Of one compiled program; bytes are of one device, as its compiler laid them out.

  flops: of all devices, recomputation included, loops as often as they run. argument_bytes: what is given, donated
  arrays among it. temporary_bytes: beside it. counts: from the compiled text.
  """

  flops: float
  argument_bytes: float
  temporary_bytes: float
  counts: CompiledCounts
  compile_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
  """What the learner's state takes on one device, by kind; known from shapes and shardings alone."""

  parameters: float  # that are trained
  frozen: float  # under an adapter
  optimizer: float
  others: float  # a critic, averaged weights, what boxes carry
  batch: float

  @property
  def state(self) -> float:
    """All but the batch."""
    return self.parameters + self.frozen + self.optimizer + self.others


class OutOfMemory(ConfigError):
  """The compiler says that a program does not fit the device."""


class Recorded(NamedTuple):
  """What the rollout records of every token beside its log-probs: ids of kept sets, experts."""

  kept_tokens: int = 0
  experts: bool = False


NOTHING = Recorded()


def abstract_batch(
  config: ModelConfig, settings: LearnerSettings, mesh: Mesh, recorded: Recorded = NOTHING
) -> PackedBatch:
  """Shapes and shardings of a full batch [M, rows, ...] as the train step takes it."""
  rows = settings.rows
  routed = (config.num_layers, config.experts_per_token) if recorded.experts else None
  empty = jax.eval_shape(
    functools.partial(empty_batch, 1, rows.shape, recorded.kept_tokens, routed)
  )
  if config.num_experts:
    weight = jax.ShapeDtypeStruct(empty.tokens.shape, jnp.float32)
    empty = empty._replace(place_weight=weight)
  if settings.objective.critic_settings is not None:
    empty = empty._replace(value_t=empty.adv_t, next_value_t=empty.adv_t)
  leading = (rows.max_micro_batches, rows.micro_batch_rows)
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*leading, *x.shape[1:]), x.dtype), empty)
  if settings.scores_proximal:
    proximal = make_proximal_score(config, mesh, settings.forward, settings.objective)
    params, frozen = (
      learner_state(config, settings, mesh).params,
      frozen_weights(config, settings, mesh),
    )
    count = jax.ShapeDtypeStruct((), np.int32)
    batch = jax.eval_shape(proximal, params, batch, count, *frozen)
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows_sharding(mesh)), batch
  )


def learner_state(config: ModelConfig, settings: LearnerSettings, mesh: Mesh) -> LearnerState:
  """Shapes and shardings of the learner's state."""
  objective, (params, _) = settings.objective, weight_shapes(config, settings.forward)
  policy = decoder.abstract_params(config) if settings.forward.adapter else None
  return abstract_state(
    params,
    make_optimizer(settings.optimizer),
    mesh,
    objective.init_state,
    critics.make_state(objective.critic_settings, settings.optimizer, policy),
    objective.average_decay is not None,
  )


def frozen_weights(config: ModelConfig, settings: LearnerSettings, mesh: Mesh) -> tuple[Any, ...]:
  """Shapes and shardings of the weights under an adapter, as programs take them; () without one."""
  _, frozen = weight_shapes(config, settings.forward)
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    frozen,
    param_shardings(frozen, mesh),
  )


def state_bytes(state: LearnerState, batch: PackedBatch, *frozen: Any) -> StateBytes:
  """Bytes on one device."""
  return StateBytes(
    parameters=_bytes(state.params),
    frozen=_bytes(frozen),
    optimizer=_bytes(state.opt_state),
    others=_bytes((state.critic, state.average, state.objective)),
    batch=_bytes(batch),
  )


def train_figures(
  config: ModelConfig, settings: LearnerSettings, mesh: Mesh, recorded: Recorded = NOTHING
) -> ProgramFigures:
  """The train step over full micro-batches.

  Raises:
    OutOfMemory: it does not fit.
  """
  step = make_train_step(
    config,
    mesh,
    forward=settings.forward,
    objective=settings.objective,
    optimizer=settings.optimizer,
    score_proximal=settings.scores_proximal,
    router=settings.router,
  )
  state = learner_state(config, settings, mesh)
  batch = abstract_batch(config, settings, mesh, recorded)
  frozen = frozen_weights(config, settings, mesh)
  return _figures(step, mesh, _counting(config, settings, mesh), state, batch, frozen)


def score_figures(
  config: ModelConfig, settings: LearnerSettings, mesh: Mesh, recorded: Recorded = NOTHING
) -> ProgramFigures:
  """Scoring without gradients, over full micro-batches.

  Raises:
    OutOfMemory: it does not fit.
  """
  params = learner_state(config, settings, mesh).params
  batch = abstract_batch(config, settings, mesh, recorded)
  score = make_score(config, mesh, settings.forward)
  frozen = frozen_weights(config, settings, mesh)
  return _figures(score, mesh, _counting(config, settings, mesh), params, batch, frozen)


def _counting(config: ModelConfig, settings: LearnerSettings, mesh: Mesh) -> Counting:
  """How often loops run: over micro-batches, and over blocks of slots of one expert."""
  rows, parts = settings.rows, mesh.shape['expert']
  trips = rows.max_micro_batches
  if not config.num_experts:
    return Counting(unknown_trips=trips)
  held = config.num_experts // parts
  tokens = rows.micro_batch_rows * rows.shape.length // row_shards(mesh.shape, 'row_parts')
  # A device sees the rows of all devices along the axis of experts, and takes the choices of its own.
  choices = parts * tokens * config.experts_per_token
  # An expert's last block is half empty, taking one with another.
  blocks = choices / parts / block_size(choices, held) + held / 2
  return Counting(unknown_trips=trips, block_trips=blocks, grouped_share=1 / parts)


def _figures(
  function: Any, mesh: Mesh, counting: Counting, trained: Any, batch: Any, frozen: tuple[Any, ...]
) -> ProgramFigures:
  count = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))
  start = time.perf_counter()
  # Mosaic asks for the device that it lowers to; none is attached, so the mesh must say it.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    flops = traced_flops(function, trained, batch, count, *frozen, counting=counting)
    compiled = compiled_or_too_large(function.lower(trained, batch, count, *frozen))
  memory = compiled.memory_analysis()
  return ProgramFigures(
    flops=flops,
    argument_bytes=memory.argument_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    counts=count_compiled(compiled.as_text(), counting=counting),
    compile_s=time.perf_counter() - start,
  )


def compiled_or_too_large(lowered: Any) -> Any:
  """The compiled form of a lowered program.

  Raises:
    OutOfMemory: its compiler says that the device has not enough memory.
  """
  try:
    return lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if not _is_of_memory(str(error)):
      raise
    raise OutOfMemory(_needed(str(error))) from error


def _is_of_memory(line: str) -> bool:
  return 'hbm' in line.lower() or 'ran out of memory' in line.lower()


def _needed(message: str) -> str:
  """The compiler's own sentence about memory."""
  lines = [line.strip() for line in message.splitlines() if _is_of_memory(line)]
  return lines[0] if lines else message.splitlines()[0]


def whole_bytes(tree: Any) -> float:
  """Of a tree of shapes, unsharded."""
  return float(sum(math.prod(leaf.shape) * _itemsize(leaf.dtype) for leaf in jax.tree.leaves(tree)))


def _itemsize(dtype: Any) -> float:
  """Bytes of a number; two int4 share one."""
  return 0.5 if dtype == jnp.int4 else jnp.dtype(dtype).itemsize


def _bytes(tree: Any) -> float:
  return float(
    sum(
      math.prod(leaf.sharding.shard_shape(leaf.shape)) * _itemsize(leaf.dtype)
      for leaf in jax.tree.leaves(tree)
    )
  )
