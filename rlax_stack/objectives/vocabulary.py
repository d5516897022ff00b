"""What an objective's boxes ask of whole distributions, as one function for the pass that has them.

Not for computing distributions (`learner/scoring.py` does). Invariant: a hook of the proximal policy
sees the weights that the proximal log-probs come from; where those are the current ones, it is
computed from the current distribution, held constant, so that both agree exactly.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from rlax_stack.objectives.boxes import BoundBox, keyword_only
from rlax_stack.objectives.objective import Objective

# (log_policy float32 [n, V], target int32 [n], proximal results by slot) -> results by slot
TokenTerms = Callable[[jax.Array, jax.Array, Mapping[str, Any]], dict[str, Any]]


def current_terms(
  objective: Objective, *, score_proximal: bool, statistics: bool = False
) -> TokenTerms | None:
  """The hooks that need the current policy's distributions, or None where there are none.

  Args:
    objective: see Objective.
    score_proximal: True where the proximal policy was scored by itself (`proximal_terms`), and its
      results are the third argument of the function; False where it is the current policy.
    statistics: True takes only the boxes whose `batch_statistics` read the results.
  """
  boxes = {
    slot: bound
    for slot, bound in objective.device_boxes.items()
    if bound.box.vocabulary is not None
    or (bound.box.proximal_vocabulary is not None and not score_proximal)
  }
  if statistics:
    boxes = {slot: bound for slot, bound in boxes.items() if _in_statistics(bound)}
  if not boxes:
    return None

  def terms(log_policy, target, proximal):
    found = {}
    for slot, bound in boxes.items():
      held, results = proximal.get(slot, {}), {}
      if bound.box.proximal_vocabulary is not None and not score_proximal:
        held = results = _of_proximal(bound, log_policy, target)
      if bound.box.vocabulary is not None:
        results = results | bound.call(bound.box.vocabulary, log_policy, target, proximal=held)
      found[slot] = results
    return found

  return terms


def proximal_terms(objective: Objective) -> TokenTerms | None:
  """The hooks that need the proximal policy's distributions, or None where there are none."""
  boxes = {k: b for k, b in objective.device_boxes.items() if b.box.proximal_vocabulary is not None}
  if not boxes:
    return None

  def terms(log_policy, target, proximal):
    del proximal
    return {slot: _of_proximal(bound, log_policy, target) for slot, bound in boxes.items()}

  return terms


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
  """The results of both by slot; those of `second` win."""
  return {slot: {**first.get(slot, {}), **second.get(slot, {})} for slot in {**first, **second}}


def _of_proximal(bound: BoundBox, log_policy: jax.Array, target: jax.Array) -> dict[str, Any]:
  held = jax.lax.stop_gradient(log_policy)
  return jax.lax.stop_gradient(bound.call(bound.box.proximal_vocabulary, held, target))


def _in_statistics(bound: BoundBox) -> bool:
  part = bound.box.batch_statistics
  return part is not None and 'vocabulary' in keyword_only(part)
