"""The reward-curve picture of a run, drawn from its metrics file.

Needs matplotlib (in the quickstart extra) and draws without a display. Not a plotting library.
Invariant: a run without matplotlib, or with nothing to draw, ends as well as any other, and is told
in one line.
"""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from rlax_stack.observe import metric_names as names
from rlax_stack.observe.json_files import read_lines

Points = tuple[list[int], list[float]]  # steps and values, of the same length

_BLUE, _ORANGE, _GREEN, _GREY = '#2563eb', '#ea580c', '#059669', '#94a3b8'
_BACKDROP = {'facecolor': 'white', 'edgecolor': 'none', 'alpha': 0.75, 'pad': 1.0}


def series(records: Sequence[Mapping[str, Any]], name: str) -> Points:
  """The steps and finite values of one metric, by step; the last record of a step counts."""
  values: dict[int, float] = {}
  for record in records:
    step, value = record.get('step'), record.get(name)
    if isinstance(step, int) and isinstance(value, (int, float)) and math.isfinite(value):
      values[step] = float(value)
  return sorted(values), [values[step] for step in sorted(values)]


def smooth(values: Sequence[float], *, weight: float = 0.85) -> list[float]:
  """Exponential moving average, corrected for its start: the first value stays as it is."""
  result, total, norm = [], 0.0, 0.0
  for value in values:
    total = weight * total + (1 - weight) * value
    norm = weight * norm + (1 - weight)
    result.append(total / norm)
  return result


def draw_reward_curve(
  metrics_path: Path, png_path: Path, *, title: str, subtitle: str = ''
) -> Path | None:
  """Draws reward and held-out accuracy above response length and entropy, all per step.

  Returns: `png_path`, or None (logged) when matplotlib is not installed or there is no reward to
  draw.
  """
  if importlib.util.find_spec('matplotlib') is None:
    logging.info('No reward-curve picture: matplotlib is not installed (pip install matplotlib).')
    return None
  records = list(read_lines(metrics_path))
  if not series(records, names.REWARD)[0]:
    logging.info('No reward-curve picture: %s holds no %s yet.', metrics_path, names.REWARD)
    return None
  # The object interface, not pyplot: no global state, no display, safe from any thread.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 6.2), dpi=130, layout='constrained', facecolor='white')
  FigureCanvasAgg(figure)
  # parse_math off: a title with a dollar sign is text, not a formula.
  figure.suptitle(title, fontsize=14, fontweight='bold', parse_math=False)
  upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
  if subtitle:
    upper.set_title(subtitle, fontsize=10, color='#475569', parse_math=False)
  _draw_rewards(upper, records)
  _draw_lengths(lower, records)
  lower.set_xlabel('step')
  lower.xaxis.get_major_locator().set_params(integer=True)
  png_path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(png_path)
  return png_path


def _draw_rewards(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
  _style(axes)
  steps, rewards = series(records, names.REWARD)
  marker = 'o' if len(steps) == 1 else None
  axes.plot(
    steps, rewards, color=_BLUE, alpha=0.3, linewidth=1, marker=marker, label='training reward'
  )
  axes.plot(steps, smooth(rewards), color=_BLUE, linewidth=2.2, label='training reward (smoothed)')
  held_steps, held_out = series(records, names.HELD_OUT)
  if held_steps:
    axes.plot(
      held_steps,
      held_out,
      color=_ORANGE,
      linewidth=1.4,
      marker='o',
      markersize=6,
      markeredgecolor='white',
      label='held-out accuracy',
    )
    for step, value in {(held_steps[0], held_out[0]), (held_steps[-1], held_out[-1])}:
      axes.annotate(
        f'{value:.2f}',
        (step, value),
        (0, -18),
        textcoords='offset points',
        ha='center',
        color=_ORANGE,
        fontweight='bold',
        bbox=_BACKDROP,
      )
  axes.set_ylabel('reward / accuracy')
  values = rewards + held_out
  if min(values) >= 0 and max(values) <= 1:
    axes.set_ylim(0, 1.05)
  axes.legend(loc='best', frameon=False, fontsize=9)


def _draw_lengths(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
  _style(axes)
  lines = []
  steps, lengths = series(records, names.RESPONSE_LENGTH)
  lines += axes.plot(steps, lengths, color=_GREEN, linewidth=1.8, label='response length')
  axes.set_ylabel('tokens', color=_GREEN)
  axes.set_ylim(bottom=0)
  steps, entropies = series(records, names.ENTROPY)
  if steps:
    right = axes.twinx()
    right.spines[['top', 'left']].set_visible(False)
    lines += right.plot(steps, entropies, color=_GREY, linewidth=1.8, label='entropy')
    right.set_ylabel('entropy (nats / token)', color='#64748b')
    right.set_ylim(bottom=0)
  axes.legend(handles=lines, loc='best', frameon=False, fontsize=9)


def _style(axes: Any) -> None:
  axes.spines[['top', 'right']].set_visible(False)
  axes.grid(color='#e2e8f0', linewidth=0.8)
  axes.set_axisbelow(True)
