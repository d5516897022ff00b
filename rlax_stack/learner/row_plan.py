"""Static shapes of a run's rows, from the limits of its config, so that XLA compiles each program
once.

Not for packing itself. Invariant: a batch within the limits given always fits the plan.
"""

import dataclasses

from rlax_stack.errors import ConfigError
from rlax_stack.learner.packing import RowShape

_TILE = 64  # row lengths are multiples of it: what attention blocks and matmuls like


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPlan:
  """`micro_batch_rows` rows of `shape` are computed at once, `max_micro_batches` times at most."""

  shape: RowShape
  micro_batch_rows: int
  max_micro_batches: int


def plan_rows(
  *,
  groups_per_batch: int,
  group_size: int,
  max_prompt_tokens: int,
  max_tokens: int,
  row_length: int = 0,
  micro_batch_tokens: int = 1024,
  data_parallel: int = 1,
  context: int = 1,
  bootstrap: bool = False,
) -> RowPlan:
  """Row length, rows per micro-batch and the largest number of micro-batches.

  Args:
    groups_per_batch: groups trained on at once.
    group_size: samples of a group at most.
    max_prompt_tokens: tokens of a prompt at most.
    max_tokens: trained span of a completion at most, in tokens.
    row_length: T; with 0 the longest possible group where that is at most 2,048 tokens (or else as
      many
      trajectories of a group as fit 2,048, one at least).
    micro_batch_tokens: tokens computed at once on one device, about; memory grows with it.
    data_parallel: devices that rows are split over.
    context: devices that the tokens of a row are split over.
    bootstrap: whether the last token of a completion may need a place too, see `pack_groups`.

  Raises:
    ConfigError: a row length in which one trajectory may not fit, or that does not divide over `context`.
  """
  placed = max_tokens if bootstrap else max_tokens - 1
  single = max_prompt_tokens + placed
  branch = max(placed, 1)
  if row_length and row_length < single:
    raise ConfigError(
      f'row_length {row_length} cannot hold a prompt of {max_prompt_tokens} and {max_tokens} '
      f'sampled tokens. Set config.learner.row_length to {single} at least, or 0 to choose it.'
    )
  problem = row_length_problem(row_length, context)
  if problem:
    raise ConfigError(problem)
  longest_group = max_prompt_tokens + group_size * branch
  length = row_length or _round_up(min(longest_group, max(2048, single)), _TILE * context)
  per_row = max((length - max_prompt_tokens) // branch, 1)
  pieces = groups_per_batch * -(-group_size // per_row)
  rows = max(micro_batch_tokens * context // length, 1) * data_parallel
  triples = _triples(length, longest_group, group_size, per_row, max_tokens)
  return RowPlan(
    shape=RowShape(length, _round_up(triples, context)),
    micro_batch_rows=rows,
    max_micro_batches=-(-pieces // rows),
  )


def row_length_problem(row_length: int, context: int) -> str:
  """What is wrong with rows that leave `context` devices a part of an attention block; '' where nothing is."""
  whole = _TILE * context
  if context == 1 or row_length % whole == 0:
    return ''
  return (
    f'config.learner.row_length={row_length} over config.learner.mesh.context={context} devices must be a multiple of '
    f'{_TILE} x {context} = {whole}. Set it to {_round_up(row_length, whole)}, or to 0 to choose it.'
  )


def _triples(
  length: int, longest_group: int, group_size: int, per_row: int, max_tokens: int
) -> int:
  """Trained tokens of a row: of as many of the longest groups as it holds, or of one in part."""
  whole_groups = length // longest_group
  return max_tokens * (whole_groups * group_size if whole_groups else min(group_size, per_row))


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple
