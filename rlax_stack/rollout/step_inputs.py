"""What a decode step prepares once for all its layers: the plan of attention and the rotations of the rows.

Where some layers see all tokens and others have a window, both are prepared and a layer picks its own: no layer
computes both. Not for the layers themselves (serving.py).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.decoder import layers_that_see_all, select
from rlax_stack.pallas_kernels.decode_work import WorkList
from rlax_stack.pallas_kernels.shared_prefix_decode import (
  NO_WINDOW,
  DecodePlan,
  plan_decode,
  select_plan,
)
from rlax_stack.rollout import serving
from rlax_stack.rollout.engine_state import EngineConfig, RowState

StepInputs = Callable[[jax.Array], tuple[DecodePlan, jax.Array, jax.Array]]


def step_inputs(
  config: ModelConfig,
  engine: EngineConfig,
  rows: RowState,
  work: WorkList,
  suffix_pages: jax.Array,
) -> StepInputs:
  """Function of int32 layer [] -> its plan, and sine and cosine as `serving.column_rotation` gives them.

  Args:
    config: shape of the model.
    engine: static sizes.
    rows: of the step.
    work: what they read of the prefix table.
    suffix_pages: int32 [M, pages_per_sample].
  """

  def plan(window: int | None) -> DecodePlan:
    return plan_decode(
      work,
      rows.position + 1 - rows.count,
      jnp.where(rows.active, rows.count, 0),
      suffix_pages,
      suffix_page_size=engine.suffix_page_size,
      window=window,
      implementation=engine.kernels,
    )

  def rotation(*, local: bool) -> tuple[jax.Array, jax.Array]:
    # The barrier keeps sine and cosine from being computed again in every layer.
    found = serving.column_rotation(config, rows.position, local=local)
    return jax.lax.optimization_barrier(found)

  own, rotations = plan(config.sliding_window), rotation(local=False)
  kinds = layers_that_see_all(config)
  if kinds is None:
    return lambda layer: (own, *rotations)
  whole = plan(NO_WINDOW)
  near = rotations if config.local_rope_theta is None else rotation(local=True)

  def of_layer(layer: jax.Array) -> tuple[DecodePlan, jax.Array, jax.Array]:
    sees_all = kinds[layer]
    return select_plan(sees_all, whole, own), *select(sees_all, rotations, near)

  return of_layer
