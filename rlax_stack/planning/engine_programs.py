"""The rollout engine's own prefill and decode programs, compiled for one described device without any array."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.pallas_kernels import dispatch
from rlax_stack.pallas_kernels.decode_work import PrefixView, make_work_list
from rlax_stack.planning.learner_programs import compiled_or_too_large
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig, empty_state
from rlax_stack.sharding import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineFigures:
  """Bytes that an engine's programs hold on their device, as its compiler laid them out.

  decode: of a chunk of decode steps with full slots, weights and KV among them. prefill: of one batch of prompts,
  weights among them and KV tables left out. compile_s: of both.
  """

  decode: float
  prefill: float
  compile_s: float


def engine_figures(config: ModelConfig, sizes: EngineConfig, device: Any) -> EngineFigures:
  """Compiles both programs for a device.

  Raises:
    OutOfMemory: one does not fit.
  """
  mesh, start = make_mesh({}, [device]), time.perf_counter()
  with dispatch.described(device):
    engine = Engine(config, sizes, join_kernels=False)  # as on the accelerators that plans are for
    params = _placed(mesh, jax.eval_shape(engine.load_params, decoder.abstract_params(config)))
    decode = _bytes(mesh, *_decode(engine, config, mesh, params), donated=1)
    prefill = _bytes(mesh, *_prefill(engine, mesh, params))
  return EngineFigures(decode=decode, prefill=prefill, compile_s=time.perf_counter() - start)


def _decode(
  engine: Engine, config: ModelConfig, mesh: Mesh, params: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  sizes = engine.engine_config
  # Contents do not matter, only how many there may be.
  views = [PrefixView(pages=(0,), length=1)] * sizes.slots
  work = make_work_list(
    views,
    page_size=sizes.page_size,
    rows_per_block=sizes.rows_per_block,
    max_items=sizes.max_items,
  )
  state = jax.eval_shape(lambda: empty_state(config, sizes))
  pages = np.zeros((sizes.slots, sizes.pages_per_sample), np.int32)
  forced = np.zeros((sizes.chunk_steps, sizes.slots), np.int32)

  def chunk(params, state, work, pages, forced):
    return engine.generate(params, state, work, pages, forced, version=0, steps=sizes.chunk_steps)

  return chunk, (params, *(_placed(mesh, x) for x in (state, work, pages, forced)))


def _prefill(engine: Engine, mesh: Mesh, params: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  sizes = engine.engine_config
  length = sizes.prompt_buckets[-1]
  batch = sizes.prefill_batches(length)[-1]
  tokens, lengths = np.zeros((batch, length), np.int32), np.zeros((batch,), np.int32)

  def prompts(params, tokens, lengths):
    return engine.prefill(params=params, padded_tokens=tokens, true_length=lengths)

  return prompts, (params, _placed(mesh, tokens), _placed(mesh, lengths))


def _placed(mesh: Mesh, tree: Any) -> Any:
  """Shapes of a tree, whole on the one device of the mesh."""
  whole = NamedSharding(mesh, PartitionSpec())
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)


def _bytes(
  mesh: Mesh,
  function: Callable[..., Any],
  arguments: tuple[Any, ...],
  *,
  donated: int | None = None,
) -> float:
  """What a compiled program holds: arguments, results that take no argument's place, and temporaries."""
  # What a program does not use is on the device all the same.
  donate = () if donated is None else donated
  program = jax.jit(function, donate_argnums=donate, keep_unused=True)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    memory = compiled_or_too_large(program.lower(*arguments)).memory_analysis()
  results = memory.output_size_in_bytes - memory.alias_size_in_bytes
  return float(memory.argument_size_in_bytes + memory.temp_size_in_bytes + results)
