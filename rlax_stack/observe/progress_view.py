"""How progress looks: one line for a pipe, one panel for a terminal, from the same numbers.

Pure functions; nothing here writes. Invariant: a line has the same keys in the same order at every
step.
"""

import dataclasses
import math
from collections.abc import Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlax_stack.observe import metric_names as names

_BLOCKS = '▁▂▃▄▅▆▇█'
_ASCII_BLOCKS = '_.-=+*#@'
_PART_COLOURS = dict(zip(names.PARTS, ('cyan', 'magenta', 'green', 'yellow', 'blue'), strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressView:
  """What there is to show. `values` are the newest metrics by name (see metric_names)."""

  title: str
  step: int
  total_steps: int | None
  values: dict[str, float]
  rewards: tuple[float, ...]  # of every step so far
  held_out: tuple[float, ...]  # of every evaluation so far
  elapsed_s: float
  eta_s: float | None
  phase: str
  phase_s: float


def final_line(before: float | None, after: float | None, minutes: float) -> str:
  """The last line of a run: `held-out accuracy: 0.21 -> 0.87 in 8.4 min`."""
  return f'held-out accuracy: {_number(before, 2)} -> {_number(after, 2)} in {minutes:.1f} min'


def duration(seconds: float | None) -> str:
  """`45s`, `6m10s`, `1h05m`, `2d03h`; `-` when unknown."""
  if seconds is None or not math.isfinite(seconds):
    return '-'
  whole = max(0, round(seconds))
  if whole < 60:
    return f'{whole}s'
  if whole < 3600:
    return f'{whole // 60}m{whole % 60:02d}s'
  if whole < 86400:
    return f'{whole // 3600}h{whole % 3600 // 60:02d}m'
  return f'{whole // 86400}d{whole % 86400 // 3600:02d}h'


def sparkline(values: Sequence[float], *, width: int = 32, ascii_only: bool = False) -> str:
  """The values as a row of at most `width` blocks, lowest to highest; neighbours are averaged to
  fit.
  """
  finite = [value for value in values if math.isfinite(value)]
  if not finite:
    return ''
  count = min(width, len(finite))
  edges = [len(finite) * index // count for index in range(count + 1)]
  means = [
    sum(finite[low:high]) / (high - low) for low, high in zip(edges, edges[1:], strict=False)
  ]
  low, span = min(means), max(means) - min(means)
  blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
  last = len(blocks) - 1
  return ''.join(blocks[round((mean - low) / span * last) if span > 0 else 0] for mean in means)


def plain_line(view: ProgressView) -> str:
  """One step as `key=value` columns; `-` where there is no value."""
  get = view.values.get
  held_out = view.held_out[-1] if view.held_out else None
  columns = {
    'step': f'{view.step}/{view.total_steps if view.total_steps is not None else "-"}',
    'reward': _number(get(names.REWARD), 3),
    'held_out': _number(held_out, 3),
    'length': _number(get(names.RESPONSE_LENGTH), 1),
    'entropy': _number(get(names.ENTROPY), 3),
    'tokens_per_s': _number(get(names.TOKENS_PER_S), 0),
    'step_s': _number(get(names.STEP_TIME_S), 2),
  }
  columns |= {part: _number(get(names.TIME + part), 2) for part in names.PARTS}
  columns |= {'staleness': _number(get(names.STALENESS), 1), 'eta': duration(view.eta_s)}
  return ' '.join(f'{key}={value}' for key, value in columns.items())


def panel(view: ProgressView, *, ascii_only: bool = False) -> RenderableType:
  """The live panel; before the first step only the running phase."""
  spinner = Spinner(
    'line' if ascii_only else 'dots', Text(f'{view.phase} {duration(view.phase_s)}')
  )
  if view.step < 0:
    return spinner
  get = view.values.get
  grid = Table.grid(padding=(0, 2))
  grid.add_column(style='dim', no_wrap=True)
  grid.add_column(no_wrap=True)
  grid.add_row('step', _step_row(view))
  trend = Text(_number(get(names.REWARD), 3), style='bold')
  trend.append('  ' + sparkline(view.rewards, ascii_only=ascii_only), style='green')
  grid.add_row('reward', trend)
  if view.held_out:
    first, last = view.held_out[0], view.held_out[-1]
    arrow = f'{_number(first, 2)} -> {_number(last, 2)}'
    grid.add_row(
      'held-out', Text(arrow if len(view.held_out) > 1 else _number(first, 2), style='bold')
    )
  length = f'{_number(get(names.RESPONSE_LENGTH), 1)} tokens'
  grid.add_row('response', f'{length}   entropy {_number(get(names.ENTROPY), 3)}')
  speed = f'{_number(get(names.TOKENS_PER_S), 0)} tokens/s'
  grid.add_row('speed', f'{speed}   {_number(get(names.STEP_TIME_S), 2)} s/step')
  grid.add_row('time', _time_row(view))
  grid.add_row('staleness', _number(get(names.STALENESS), 1))
  grid.add_row('elapsed', f'{duration(view.elapsed_s)}   ETA {duration(view.eta_s)}')
  body = Group(grid, spinner) if view.phase else grid
  return Panel(body, title=Text(view.title), title_align='left', border_style='dim', width=76)


def _step_row(view: ProgressView) -> RenderableType:
  if not view.total_steps:
    return str(view.step)
  row = Table.grid(padding=(0, 2))
  bar = Bar(view.total_steps, 0, view.step, width=32, color='green', bgcolor='grey23')
  row.add_row(f'{view.step}/{view.total_steps}', bar)
  return row


def _time_row(view: ProgressView) -> Text:
  text = Text()
  for part in names.PARTS:
    fraction = view.values.get(names.TIME + part)
    if fraction is not None and math.isfinite(fraction):
      text.append(f'{part} {fraction:.0%}  ', style=_PART_COLOURS[part])
  return text


def _number(value: float | None, digits: int) -> str:
  return f'{value:.{digits}f}' if value is not None and math.isfinite(value) else '-'
