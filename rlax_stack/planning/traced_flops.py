"""FLOPs of a traced program, every loop counted as often as it runs.

`cost_analysis()` of a compiled program counts the body of a loop once. The traced program knows how long its scans
are, and its loops of unknown length are those over micro-batches, whose number the caller gives. Matrix products
and kernels with a cost estimate are counted; what is elementwise is not.
"""

import math
from typing import Any

import jax


def traced_flops(function: Any, *arguments: Any, unknown_trips: int = 1) -> float:
  """FLOPs of one call on all devices together.

  Args:
    function: what jax can trace.
    arguments: arrays, or their shapes.
    unknown_trips: how often a loop without a known length runs.
  """
  return _of_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr, unknown_trips)


def _of_jaxpr(jaxpr: Any, unknown_trips: int) -> float:
  return sum(_of_equation(equation, unknown_trips) for equation in jaxpr.eqns)


def _of_equation(equation: Any, unknown_trips: int) -> float:
  name, params = equation.primitive.name, equation.params
  if name == 'dot_general':
    return _of_product(equation)
  if name in ('ragged_dot', 'ragged_dot_general'):
    rows, width = equation.invars[0].aval.shape[-2:]
    return 2.0 * rows * width * equation.outvars[0].aval.shape[-1]
  if name == 'pallas_call':
    estimate = params.get('cost_estimate')
    return float(estimate.flops) if estimate else 0.0
  if name == 'while':
    return unknown_trips * _of_jaxpr(params['body_jaxpr'].jaxpr, unknown_trips)
  if name == 'cond':  # the dearest branch
    return max(_of_jaxpr(branch.jaxpr, unknown_trips) for branch in params['branches'])
  times = params['length'] if name == 'scan' else 1
  if name == 'shard_map':  # traced for one device
    times = params['mesh'].size
  return times * sum(_of_jaxpr(inner, unknown_trips) for inner in _inner(params))


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
