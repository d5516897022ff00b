"""FLOPs of a traced program, every loop counted as often as it runs.

`cost_analysis()` of a compiled program counts the body of a loop once. The traced program knows how long its scans
are. Its loops of unknown length are those over micro-batches and those over the blocks of experts, whose numbers the
caller gives. Matrix products and kernels with a cost estimate are counted; what is elementwise is not.
"""

import dataclasses
import math
from typing import Any

import jax

from rlax_stack.models import experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting:
  """What a traced program does not say.

  unknown_trips: how often a loop without a known length runs; block_trips: one over blocks of experts. grouped_share:
  part of the rows of a grouped product that are of groups that the device has.
  """

  unknown_trips: float = 1
  block_trips: float = 1
  grouped_share: float = 1

  def trips(self, scopes: str) -> float:
    """How often a loop without a known length runs, by the scopes that it was traced in."""
    return self.block_trips if experts.LOOP in scopes else self.unknown_trips


ONCE = Counting()


def traced_flops(function: Any, *arguments: Any, counting: Counting = ONCE) -> float:
  """FLOPs of one call on all devices together.

  Args:
    function: what jax can trace.
    arguments: arrays, or their shapes.
    counting: see Counting.
  """
  return _of_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr, counting)


def _of_jaxpr(jaxpr: Any, counting: Counting) -> float:
  return sum(_of_equation(equation, counting) for equation in jaxpr.eqns)


def _of_equation(equation: Any, counting: Counting) -> float:
  name, params = equation.primitive.name, equation.params
  if name == 'dot_general':
    return _of_product(equation)
  if name in ('ragged_dot', 'ragged_dot_general'):
    rows, width = equation.invars[0].aval.shape[-2:]
    return 2.0 * counting.grouped_share * rows * width * equation.outvars[0].aval.shape[-1]
  if name == 'pallas_call':
    estimate = params.get('cost_estimate')
    return float(estimate.flops) if estimate else 0.0
  if name == 'while':
    trips = counting.trips(str(equation.source_info.name_stack))
    return trips * _of_jaxpr(params['body_jaxpr'].jaxpr, counting)
  if name == 'cond':  # the dearest branch
    return max(_of_jaxpr(branch.jaxpr, counting) for branch in params['branches'])
  times = params['length'] if name == 'scan' else 1
  if name == 'shard_map':  # traced for one device
    times = params['mesh'].size
  return times * sum(_of_jaxpr(inner, counting) for inner in _inner(params))


def _inner(params: dict[str, Any]) -> list[Any]:
  """Programs within an equation."""
  found = []
  for value in params.values():
    program = getattr(value, 'jaxpr', value)  # closed or not
    if hasattr(program, 'eqns'):
      found.append(program)
  return found


def _of_product(equation: Any) -> float:
  (contracted, _), _ = equation.params['dimension_numbers']
  depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
  return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
