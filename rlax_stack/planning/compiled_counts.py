"""What one device does in a compiled program, loops counted as often as they run, from the text of its HLO.

Counted are collectives, by kind, with the bytes that one device sends, and the FLOPs of matrix products outside of
custom kernels. A loop says how often it runs (`known_trip_count`), or its condition compares a counter from 0 with a
constant, or it is one whose number the caller gives. A collective that a TPU program does in parts, among other work,
is counted where it starts.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from rlax_stack.planning.traced_flops import ONCE, Counting

COLLECTIVES = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')

_ITEM_BYTES = {
  'pred': 1,
  's8': 1,
  'u8': 1,
  's4': 0.5,
  'u4': 0.5,
  'bf16': 2,
  'f16': 2,
  's16': 2,
  'u16': 2,
}
_ITEM_BYTES |= {'f32': 4, 's32': 4, 'u32': 4, 'f64': 8, 's64': 8, 'u64': 8, 'c64': 8}
_HEAD = re.compile(r'^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$')
_OP = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
_SHAPE = re.compile(r'\b([a-z]\w*)\[([\d,]*)\]')
_CALLED = re.compile(r'(?:calls|to_apply|body|condition)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAMES = re.compile(r'%([\w.\-]+)')


@dataclasses.dataclass(frozen=True)
class Operation:
  """One line: its name, the type of its result, what it does, and the rest of the line."""

  name: str
  result: str
  kind: str
  rest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledCounts:
  """Of one device and one call.

  calls, sent_bytes: of collectives by kind. product_flops: of matrix products that are not in custom kernels.
  """

  calls: Mapping[str, float]
  sent_bytes: Mapping[str, float]
  product_flops: float


def count_compiled(text: str, *, counting: Counting = ONCE) -> CompiledCounts:
  """Counts the program of a text.

  Args:
    text: `compiled.as_text()`.
    counting: how often loops without a known number run.
  """
  computations, entry = _computations(text)
  calls: dict[str, float] = dict.fromkeys(COLLECTIVES, 0.0)
  sent, flops = dict(calls), 0.0
  for times, name, goes_on in _runs(computations, entry, counting):
    shapes = {operation.name: operation.result for operation in computations[name]}
    for operation in computations[name]:
      kind = operation.kind.removesuffix('-start')
      if kind in COLLECTIVES and not goes_on:
        # As TPU programs write a sum of which every device keeps its own part.
        scattered = kind == 'all-reduce' and name.startswith('all-reduce-scatter')
        share = 0.5 if scattered else 1.0
        calls['reduce-scatter' if scattered else kind] += times
        sent['reduce-scatter' if scattered else kind] += (
          share * times * _sent_bytes(kind, operation)
        )
      flops += times * _product_flops(operation, shapes)
  return CompiledCounts(calls=calls, sent_bytes=sent, product_flops=flops)


def _computations(text: str) -> tuple[dict[str, list[Operation]], str]:
  found: dict[str, list[Operation]] = {}
  entry, current = '', ''
  for line in text.splitlines():
    head = _HEAD.match(line)
    if head:
      current = head[1]
      found[current] = []
      entry = current if line.startswith('ENTRY') else entry
      continue
    operation = _OP.match(line)
    if operation and current:
      found[current].append(Operation(*operation.groups()))
  return found, entry


def _runs(
  computations: Mapping[str, list[Operation]], entry: str, counting: Counting
) -> Iterator[tuple[float, str, bool]]:
  """(times, computation, whether its collectives go on with what began elsewhere) for every way from the entry to one.

  Of a branch all sides count.
  """
  waiting = [(1.0, entry, False)]
  while waiting:
    times, name, goes_on = waiting.pop()
    yield times, name, goes_on
    for operation in computations[name]:
      inner = times
      if operation.kind == 'while':
        known = _trips(computations, operation)
        inner *= counting.trips(operation.rest) if known is None else known
      called = _CALLED.findall(operation.rest)
      branches = _BRANCHES.search(operation.rest)
      if branches:
        called += re.findall(r'%?([\w.\-]+)', branches[1])
      later = goes_on or operation.name.startswith('async-collective-done')
      waiting += [
        (inner, other, later or other.startswith('async_collective_fusion'))
        for other in called
        if other in computations
      ]


def _trips(computations: Mapping[str, list[Operation]], loop: Operation) -> int | None:
  """How often a loop runs: as it says itself, or as its condition `counter < constant` does."""
  known = _TRIPS.search(loop.rest)
  if known:
    return int(known[1])
  condition = re.search(r'condition=%?([\w.\-]+)', loop.rest)
  operations = computations.get(condition[1], []) if condition else []
  constants = {
    operation.name: int(value[1])
    for operation in operations
    if operation.kind == 'constant' and (value := re.match(r'(\d+)\)', operation.rest))
  }
  for operation in operations:
    if operation.kind == 'compare' and 'direction=LT' in operation.rest:
      limits = [constants[n] for n in _NAMES.findall(operation.rest) if n in constants]
      return limits[0] if limits else None
  return None


def _elements(dimensions: str) -> int:
  return math.prod(int(size) for size in dimensions.split(',') if size)


def _largest_bytes(result: str) -> float:
  """Of the largest array of a type; the start of a collective holds its operand beside its result."""
  sizes = [_ITEM_BYTES.get(kind, 1) * _elements(dims) for kind, dims in _SHAPE.findall(result)]
  return max(sizes, default=0.0)


def _all_bytes(result: str) -> float:
  return sum(_ITEM_BYTES.get(kind, 1) * _elements(dims) for kind, dims in _SHAPE.findall(result))


def _group_size(rest: str) -> int:
  iota = re.search(r'replica_groups=\[(\d+),(\d+)\]', rest)
  if iota:
    return int(iota[2])
  named = re.search(r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}', rest)
  if named:
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    # An axis, or a part of one: 'name':(before)size.
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
    return math.prod(int(part) if part else sizes[name] for name, part in axes)
  listed = re.search(r'replica_groups=\{\{([\d,]*)\}', rest)
  return len(listed[1].split(',')) if listed else 2


def _sent_bytes(kind: str, operation: Operation) -> float:
  """What a device sends by ring algorithms."""
  size, is_start = _group_size(operation.rest), operation.kind.endswith('-start')
  whole = (_largest_bytes if is_start else _all_bytes)(operation.result)
  share = (size - 1) / size
  if kind == 'collective-permute':
    return whole
  if kind == 'all-reduce':
    return 2 * share * whole
  if kind == 'reduce-scatter':
    return share * whole * (1 if is_start else size)
  return share * whole


def _product_flops(operation: Operation, shapes: Mapping[str, str]) -> float:
  if operation.kind not in ('dot', 'convolution'):
    return 0.0
  operands = _NAMES.findall(operation.rest.split('),')[0])
  found = [
    _SHAPE.search(text) for text in (operation.result, *(shapes.get(n, '') for n in operands[:2]))
  ]
  if len(found) < 3 or not all(found):
    return 0.0
  out, left, right = (
    [int(size) for size in shape[2].split(',') if size] for shape in found if shape
  )
  if operation.kind == 'convolution':
    return _convolution_flops(operation.rest, out, left, right)
  contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', operation.rest)
  axes = [int(axis) for axis in contracted[1].split(',') if axis] if contracted else []
  return 2.0 * math.prod(left[axis] for axis in axes) * math.prod(out)


def _convolution_flops(rest: str, out: list[int], left: list[int], right: list[int]) -> float:
  """As TPU programs write products: spatial axes may be padded, and what lies on padding is not multiplied."""
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', rest)
  if labels is None:
    return 0.0
  window = dict(
    re.findall(r'(\w+)=([\dx_\-]+)', (re.search(r'window=\{([^}]*)\}', rest) or ['', ''])[1])
  )
  total = 2.0 * out[labels[3].index('b')] * out[labels[3].index('f')] * right[labels[2].index('i')]
  for axis, size in enumerate(window.get('size', '').split('x')):
    if size:
      reach = (out[labels[3].index(str(axis))], int(size), left[labels[1].index(str(axis))])
      total *= _places(*reach, *(_of_axis(window, name, axis) for name in _WINDOW))
  return total


_WINDOW = ('stride', 'pad', 'lhs_dilate', 'rhs_dilate')


def _of_axis(window: Mapping[str, str], name: str, axis: int) -> int:
  """A number of a window; of its padding that before the axis."""
  default = '0' if name == 'pad' else '1'
  parts = window[name].split('x') if name in window else []
  return int((parts[axis] if parts else default).split('_')[0])


def _places(
  out: int, size: int, into: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
  """Pairs of an output and a tap of the window that lies on an input."""
  count = 0
  for tap in range(size):
    for place in range(tap * rhs_dilate - pad, tap * rhs_dilate - pad + out * stride, stride):
      count += 0 <= place <= (into - 1) * lhs_dilate and place % lhs_dilate == 0
  return count
