"""Jinja in a sandbox with a budget, for programs that come out of model files.

Jinja's immutable sandbox keeps a template from attributes and from changing what it is given. On
top, loop turns and calls are counted, the time is watched, and every string, list and the
whole output are capped, so that a hostile template ends with an error in bounded time and memory.
"""

import functools
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_SOURCE_LIMIT = 128 * 1024  # characters; the longest known templates have about 20 thousand
_SIZE_LIMIT = 2**20  # characters of a string, items of a list, characters put out in one rendering
_STEP_LIMIT = 50_000  # loop turns and calls in one rendering
_TIME_LIMIT_S = 5.0
# What grows its input without bound, or differs from call to call.
_DENIED_FILTERS = (
  'batch',
  'center',
  'format',
  'indent',
  'pprint',
  'random',
  'slice',
  'urlize',
  'wordwrap',
  'xmlattr',
)
_DENIED_METHODS = frozenset(
  (
    'center',
    'encode',
    'expandtabs',
    'format',
    'format_map',
    'ljust',
    'rjust',
    'to_bytes',
    'translate',
    'zfill',
  )
)


def render(template: str, variables: Mapping[str, Any]) -> str:
  """The output of the template `template` (Jinja source) over `variables`.

  Raises:
    jinja2.TemplateError: malformed, raised by the template itself (`raise_exception`), out of the
      sandbox or out of its budget. Other errors of Python come from what the template does with its
      values.
  """
  if len(template) > _SOURCE_LIMIT:
    raise SecurityError(f'{len(template)} characters of source, limit {_SOURCE_LIMIT}.')
  _ENVIRONMENT.start()
  return _compile(template).render(variables)


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
  return _ENVIRONMENT.from_string(template)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """Plain JSON, as transformers has it (Jinja's own escapes for HTML)."""
  if (indent or 0) > 16 or any(len(text) > 8 for text in separators or ()):
    raise SecurityError('tojson with a large indent or separator.')
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _check_size(size: int) -> None:
  if size > _SIZE_LIMIT:
    raise SecurityError(f'a value or output of {size} items, limit {_SIZE_LIMIT}.')


def _join(items: Iterable[Any], separator: str = '') -> str:
  parts, size = [], 0
  for item in items:
    parts.append(str(item))
    size += len(parts[-1]) + len(separator)
    _check_size(size)
  return str(separator).join(parts)


def _join_to(separator: str, items: Iterable[Any]) -> str:
  return _join(items, separator)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
  text, old, new = str(text), str(old), str(new)
  found = text.count(old) if count < 0 else min(text.count(old), count)
  _check_size(len(text) + found * len(new))
  return text.replace(old, new, found)


def _range(*args: int) -> range:
  value = range(*args)
  _check_size(len(value))
  return value


class _Generation(Extension):
  """Takes `{% generation %}` (transformers marks the assistant's tokens by it) as a plain block."""

  tags = {'generation'}

  def parse(self, parser: Any) -> list[nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


class _Metered(NodeTransformer):
  """Puts calls of the environment's meters where the sandbox has no hook of its own."""

  def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
    parts = [self.visit(part) for part in node.nodes]
    return _meter('concat_strings', nodes.List(parts, lineno=node.lineno), lineno=node.lineno)

  def visit_For(self, node: nodes.For) -> nodes.Node:
    self.generic_visit(node)
    node.iter = _meter('count_items', node.iter, lineno=node.lineno)
    return node


def _meter(name: str, argument: nodes.Node, *, lineno: int) -> nodes.Call:
  function = nodes.EnvironmentAttribute(name, lineno=lineno)
  arguments: list[Any] = [argument]  # the parser types what a loop goes over as any node
  return nodes.Call(function, arguments, [], None, None, lineno=lineno)


class _Environment(ImmutableSandboxedEnvironment):
  """The sandbox with its meters. The budget belongs to the thread that renders."""

  intercepted_binops = frozenset(('+', '*', '**', '%'))

  def __init__(self):
    super().__init__(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=['jinja2.ext.loopcontrols', _Generation],
      finalize=self._put_out,
    )
    self._budget = threading.local()
    for name in _DENIED_FILTERS:
      del self.filters[name]
    self.filters |= {'tojson': _to_json, 'join': _join, 'replace': _replace}
    self.globals = {
      'dict': dict,
      'namespace': Namespace,
      'raise_exception': _raise_exception,
      'range': _range,
    }

  def start(self) -> None:
    """Fills the budget before a rendering."""
    self._budget.steps = 0
    self._budget.output = 0
    self._budget.deadline = time.monotonic() + _TIME_LIMIT_S

  def tick(self) -> None:
    """One turn of a loop, one call of a function, method or macro."""
    self._budget.steps += 1
    if self._budget.steps > _STEP_LIMIT:
      raise SecurityError(f'more than {_STEP_LIMIT} steps.')
    if time.monotonic() > self._budget.deadline:
      raise SecurityError(f'more than {_TIME_LIMIT_S} s.')

  def count_items(self, items: Any) -> Any:
    """What a loop runs over; ticks for each item, those that the loop passes over included."""
    if isinstance(items, Iterator):
      return self._ticking(items)
    for _ in items:
      self.tick()
    return items

  def concat_strings(self, parts: list[Any]) -> str:
    """The `~` operator."""
    return _join(parts)

  def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
    """Operators, refused where the result would be huge."""
    sized = [side for side in (left, right) if hasattr(side, '__len__')]
    if operator == '%' and isinstance(left, str):
      raise SecurityError('formatting with % is not allowed.')
    if operator == '**' and max(abs(left), abs(right)) > 1000:
      raise SecurityError('a power above 1000.')
    if operator == '*' and len(sized) == 1:
      _check_size(len(sized[0]) * (right if sized[0] is left else left))
    if operator == '+' and sized:
      _check_size(sum(len(side) for side in sized))
    value = super().call_binop(context, operator, left, right)
    if isinstance(value, int) and value.bit_length() > 512:
      raise SecurityError('a whole number above 512 bits.')
    return value

  def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls, macros and recursive loops among them; refuses what grows a value without bound."""
    self.tick()
    owner, name = getattr(function, '__self__', None), getattr(function, '__name__', '')
    if isinstance(owner, str | int) and name in _DENIED_METHODS:
      raise SecurityError(f'the method {name} is not allowed.')
    if isinstance(owner, str) and name in ('join', 'replace'):
      function = functools.partial(_join_to if name == 'join' else _replace, owner)
    return super().call(context, function, *args, **kwargs)

  def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
    return _Metered().visit(super()._parse(source, name, filename))

  def _put_out(self, value: Any) -> str:
    text = str(value)
    self._budget.output += len(text)
    _check_size(self._budget.output)
    return text

  def _ticking(self, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
      self.tick()
      yield item


_ENVIRONMENT = _Environment()
