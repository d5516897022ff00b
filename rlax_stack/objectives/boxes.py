"""Boxes: the parts an objective is composed of, and the strings that a config names them with.

A box is a pure function and one `Box` entry in the TABLE of its module. A config names it as
`name` or `name(option=literal, ...)`; the options, their types and defaults are the keyword-only
parameters of the function and of its hooks. Not for what a box computes. Invariant: a `BoundBox`
holds every option of its box, checked, so nothing about it can fail later.
"""

import ast
import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlax_stack.errors import ConfigError

# Handed to a function or hook whose signature names them; never options.
RESERVED = ('statistics', 'state', 'ratio', 'vocabulary', 'proximal', 'gradient_norms')

TAGS = {
  'group': 'compares the samples of a group: group_size must be 2 or more',
  'batch': 'reads rewards of other groups too: of the batch, or of batches before',
  'greedy': 'compares with a greedy sample: one more is drawn per prompt, and not trained on',
  'steps': 'reads rewards of single steps: some verifier has to give them',
  'critic': 'reads values: needs a critic',
  'unscored': 'its hooks read no log-probs: nothing is scored for them before the micro-batches',
  'anchor': 'reads anchor_log_probs_t: the starting weights are scored at every batch',
  'teacher': 'reads teacher_log_probs_t: config.learner.teacher is scored at every batch',
  'entropy_gradient': 'differentiates entropy_t',
  'host_scores': 'reads log_probs_t and anchor_log_probs_t of the RewardBatch',
  'importance': 'weighs by proximal / behaviour',
  'behaviour': 'compares with the sampling policy, but does not weigh by it',
  'token_mask': 'keeps or drops single tokens by their own ratio',
  'pooled': 'a ratio of more tokens than one',
  'no_ratio': 'a loss that reads no ratio',
}


class Range(NamedTuple):
  """Bounds of a number, both included, for `Annotated[float, Range(0.0, 1.0)]`."""

  low: float = -math.inf
  high: float = math.inf


@dataclasses.dataclass(frozen=True)
class Box:
  """One entry of a TABLE. Every callable takes the options that its signature names.

  function: the box; its arguments depend on the slot, see docs/algorithms.md.
  formula: one fragment of a formula; `{option}` stands for an option's value.
  tags: what the box needs or does, names of TAGS.
  batch_statistics: (LossInputs of [M, rows, N] arrays) -> Statistics, before the micro-batches;
    beyond the ratio's slot it may name `ratio`, the Ratio of the same tokens.
  proximal: for ratios: (LossInputs) -> proximal_log_probs_t, before all others.
  average: for ratios: () -> decay of the averaged weights that are the proximal policy, or None.
  vocabulary: (log_policy float32 [n, V], target int32 [n]) -> dict of [n, ...] arrays, from the
    current policy's whole distribution at n tokens; it may name `proximal`, what the next hook gave
    for the same tokens. Function and `batch_statistics` get the results of both as `vocabulary`,
    [..., N, ...]; a gradient flows through what the hook does not hold.
  proximal_vocabulary: the same of the proximal policy, held constant.
  token_advantages: for advantages: (LossInputs of [M, rows, N] arrays) -> adv_t, before the statistics;
    it may name `gradient_norms`, ‖∇ Σ log π‖² of each token's trajectory, a backward pass for each.
  value_targets: for advantages tagged 'critic': (LossInputs of [M, rows, N] arrays) -> target_t.
  init_state: () -> pytree of float32 arrays that lives from step to step and in checkpoints.
  update_state: (state, metrics: dict of float32 scalars) -> state, after every applied update.
  host_state: for shaping and advantages: () -> JSON object that lives from batch to batch and in
    checkpoints; the function then takes `state` and gives (what it gives, the next state).
  """

  function: Callable[..., Any]
  _: dataclasses.KW_ONLY
  formula: str
  tags: frozenset[str] = frozenset()
  batch_statistics: Callable[..., Any] | None = None
  proximal: Callable[..., Any] | None = None
  average: Callable[..., Any] | None = None
  vocabulary: Callable[..., Any] | None = None
  proximal_vocabulary: Callable[..., Any] | None = None
  token_advantages: Callable[..., Any] | None = None
  value_targets: Callable[..., Any] | None = None
  init_state: Callable[..., Any] | None = None
  update_state: Callable[..., Any] | None = None
  host_state: Callable[..., Any] | None = None

  @property
  def parts(self) -> tuple[Callable[..., Any], ...]:
    """The function and the hooks that there are."""
    hooks = (self.proximal, self.average, self.vocabulary, self.proximal_vocabulary)
    hooks += (self.token_advantages, self.value_targets, self.batch_statistics)
    hooks += (self.init_state, self.update_state, self.host_state)
    return (self.function, *(hook for hook in hooks if hook is not None))


Table = Mapping[str, Box]


@dataclasses.dataclass(frozen=True)
class BoundBox:
  """A box with the values of all its options. Hashable: equal boxes share compiled programs."""

  name: str
  box: Box
  options: tuple[tuple[str, Any], ...] = ()

  def __call__(self, *args: Any, **extra: Any) -> Any:
    """Calls the box's function; `extra` holds `statistics` and `state`, passed on where named."""
    return self.call(self.box.function, *args, **extra)

  def call(self, part: Callable[..., Any] | None, *args: Any, **extra: Any) -> Any:
    """Calls the function or a hook with the options and the extras that its signature names."""
    if part is None:
      raise ConfigError(f'box {self.name} has no such part.')
    known = dict(self.options) | extra
    return part(*args, **{name: known[name] for name in keyword_only(part) if name in known})

  @property
  def text(self) -> str:
    """The box as a config would name it, every option written out."""
    return f'{self.name}({", ".join(f"{name}={value!r}" for name, value in self.options)})'

  @property
  def formula(self) -> str:
    """The box's fragment of the formula line."""
    return self.box.formula.format(**dict(self.options))


def bind(text: str, table: Table, path: str, *, fill: Mapping[str, Any] | None = None) -> BoundBox:
  """The box that `text` names, with checked options.

  Args:
    text: `name` or `name(option=literal, ...)`.
    table: the slot's boxes.
    path: of the config field, for messages.
    fill: values for options of these names that are left at 0 (such as max_tokens, from the run).

  Raises:
    ConfigError: not of that form, an unknown box or option, or a value of another type or range.
  """
  name, given = _parse(text, path)
  if name not in table:
    raise ConfigError(f'{path} names no box {name!r}. {_listed(name, table)}')
  box = table[name]
  known = box_options(box)
  for option in given:
    if option not in known:
      raise ConfigError(f'{path}: {name} has no option {option!r}. {_listed(option, known)}')
  options = []
  for option, (hint, default) in known.items():
    value = given.get(option, default)
    if fill and option in fill and value == 0:
      value = fill[option]
    options.append((option, _checked(value, hint, f'{path}: {option} of {name}')))
  return BoundBox(name, box, tuple(options))


def box_options(box: Box) -> dict[str, tuple[Any, Any]]:
  """Options of a box: name to (type, default); those of its function first, then of its hooks."""
  options: dict[str, tuple[Any, Any]] = {}
  for part in box.parts:
    hints = typing.get_type_hints(part, include_extras=True)
    for name, default in keyword_only(part).items():
      if name not in RESERVED:
        options.setdefault(name, (hints[name], default))
  return options


def keyword_only(function: Callable[..., Any]) -> dict[str, Any]:
  """The keyword-only parameters of a function or hook and their defaults."""
  parameters = inspect.signature(function).parameters.values()
  return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _parse(text: str, path: str) -> tuple[str, dict[str, Any]]:
  """Name and options of a box string; nothing is evaluated but literals."""
  shape = 'Write name or name(option=value, ...), such as ppo_clip(delta_low=0.2).'
  try:
    node = ast.parse(text.strip(), mode='eval').body
    if isinstance(node, ast.Name):
      return node.id, {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
      pairs = [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in node.keywords]
      names = [name for name, _ in pairs if name is not None]
      if len(set(names)) == len(pairs):
        return node.func.id, {name: value for name, value in pairs if name is not None}
  except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
    raise ConfigError(f'{path} cannot be read: {text!r}. {shape}') from error
  raise ConfigError(f'{path} is not the name of a box: {text!r}. {shape}')


def _listed(name: str, names: Any) -> str:
  """The names there are, nearest first."""
  if not names:
    return 'It has none.'
  ordered = difflib.get_close_matches(name.lower(), sorted(names), n=len(names), cutoff=0.0)
  return f'There are: {", ".join(ordered)}.'


def _checked(value: Any, hint: Any, where: str) -> Any:
  """`value` as the type that `hint` says, or a ConfigError that says what was expected."""
  expected, bounds = hint, Range()
  if typing.get_origin(hint) is typing.Annotated:
    expected, *extras = typing.get_args(hint)
    bounds = next((extra for extra in extras if isinstance(extra, Range)), bounds)
  matched, value = _matches(value, expected)
  if not matched:
    raise ConfigError(f'{where} must be {_spoken(expected)}, got {value!r}.')
  if isinstance(value, int | float) and not isinstance(value, bool):
    if not bounds.low <= value <= bounds.high:  # NaN never holds
      raise ConfigError(f'{where} must be from {bounds.low:g} to {bounds.high:g}, got {value!r}.')
  return value


def _matches(value: Any, hint: Any) -> tuple[bool, Any]:
  """Whether `value` is of the type, and the value as that type (an int where a float is due)."""
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Literal:
    return value in args and type(value) in {type(arg) for arg in args}, value
  if origin in (typing.Union, types.UnionType):
    for arg in args:
      matched, as_type = _matches(value, arg)
      if matched:
        return True, as_type
    return False, value
  if origin is tuple:
    if not isinstance(value, tuple | list):
      return False, value
    items = [_matches(item, args[0]) for item in value]
    return all(matched for matched, _ in items), tuple(item for _, item in items)
  if hint is type(None):
    return value is None, value
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    return True, float(value)
  return isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool), value


def _spoken(hint: Any) -> str:
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Literal:
    return f'one of {", ".join(repr(arg) for arg in args)}'
  if origin in (typing.Union, types.UnionType):
    return ' or '.join(_spoken(arg) for arg in args)
  if origin is tuple:
    return f'a tuple of {_spoken(args[0])}'
  return 'None' if hint is type(None) else f'a {hint.__name__}'
