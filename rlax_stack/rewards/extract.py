r"""Finding the answer in a model's text: numbers, `\boxed{}`, markers and answer tags.

Everything here is plain string work in linear time: no evaluation, no symbolic parsing, so that it may run in
the process that trains. Text is read from its end, because the last answer is the final one.
"""

import decimal
import re

MAX_CHARS = 65_536  # only this much of the end of a text is searched

# Groups of thousands are bounded, so that a failed match cannot make the search quadratic.
_NUMBER = re.compile(
  r'(?:(?<![\w)\]])[-+]\$?)?'
  r'(?:(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)'
  r'(?:[eE][-+]?[0-9]{1,3}(?!\w))?',
  re.ASCII,
)
_FRACTION = re.compile(r'([-+]?)\\[dt]?frac\{([0-9]{1,40})\}\{([0-9]{1,40})\}')
_MINUS_SIGNS = str.maketrans({'\u2212': '-', '\u2013': '-', '\ufe63': '-', '\uff0d': '-'})
_CONTEXT = decimal.Context(prec=60)


def _decimal(token: str) -> decimal.Decimal:
  return decimal.Decimal(token.replace(',', '').replace('$', ''))


def numbers_in(text: str) -> list[decimal.Decimal]:
  """All numbers of the last `MAX_CHARS` characters of a text, in order.

  Commas between groups of three digits, a sign, decimals and an exponent of up to three digits belong to a
  number; a minus directly after a word or a closing bracket is an operator ('3-5' holds 3 and 5).
  """
  tail = text[-MAX_CHARS:].translate(_MINUS_SIGNS)
  return [_decimal(match.group()) for match in _NUMBER.finditer(tail)]


def parse_number(text: str) -> decimal.Decimal | None:
  """The number that the whole text is (a leading '$' and a trailing '%' or '.' aside), else None."""
  cleaned = text.strip().translate(_MINUS_SIGNS).removeprefix('$').rstrip('.%')
  return _decimal(cleaned) if _NUMBER.fullmatch(cleaned) else None


def last_boxed(text: str) -> str | None:
  r"""Content of the last closed `\boxed{...}` (nested braces balanced), else None."""
  tail = text[-MAX_CHARS:]
  start = tail.rfind('\\boxed{')
  if start < 0:
    return None
  depth, begin = 1, start + len('\\boxed{')
  for index in range(begin, len(tail)):
    depth += {'{': 1, '}': -1}.get(tail[index], 0)
    if depth == 0:
      return tail[begin:index]
  return None


def after_marker(text: str, marker: str) -> str | None:
  """What follows the last occurrence of `marker`, else None."""
  _, found, rest = text[-MAX_CHARS:].rpartition(marker)
  return rest if found else None


def last_tag(text: str, tag: str = 'answer') -> str | None:
  """Content of the last `<tag>...</tag>`, else None."""
  rest = after_marker(text, f'<{tag}>')
  if rest is None:
    return None
  inside, closed, _ = rest.partition(f'</{tag}>')
  return inside if closed else None


def answer_number(text: str, marker: str | None = None) -> decimal.Decimal | None:
  r"""The number that a text gives as its answer, or None.

  With a `marker`: the first number after its last occurrence, and None without one. Otherwise the last number
  inside the last `\boxed{}` (a lone `\frac{a}{b}` there is divided), or the last number of the text.
  """
  if marker is not None:
    rest = after_marker(text, marker)
    found = numbers_in(rest) if rest is not None else []
    return found[0] if found else None
  boxed = last_boxed(text)
  if boxed is not None:
    fraction = _FRACTION.fullmatch(boxed.strip().translate(_MINUS_SIGNS))
    if fraction and int(fraction[3]):
      return _CONTEXT.divide(
        decimal.Decimal(fraction[1] + fraction[2]), decimal.Decimal(fraction[3])
      )
  found = numbers_in(text if boxed is None else boxed)
  return found[-1] if found else None


def numbers_equal(left: decimal.Decimal, right: decimal.Decimal, tolerance: float) -> bool:
  """Whether |left - right| <= tolerance (absolute). With tolerance 0 the comparison is exact."""
  if left == right:
    return True
  difference = abs(_CONTEXT.subtract(left, right))
  return tolerance > 0 and difference <= decimal.Decimal(tolerance)


def extract_answer(text: str, how: str, marker: str | None = None) -> str | None:
  r"""The answer part of a text.

  Args:
    text: decoded completion.
    how: 'text' (all of it), 'last_line' (last line that is not blank), 'boxed' (last `\boxed{}`), 'tag' (last
      `<answer>...</answer>`) or 'marker' (the rest of the line after the last `marker`).
    marker: needed by 'marker' only.

  Returns: the stripped part, or None where the text has no such part.
  """
  part = EXTRACTIONS[how](text, marker)
  return None if part is None else part.strip()


def _last_line(text: str) -> str | None:
  lines = [line for line in text.splitlines() if line.strip()]
  return lines[-1] if lines else None


def _marker_line(text: str, marker: str | None) -> str | None:
  rest = after_marker(text, marker) if marker else None
  return None if rest is None else rest.strip().partition('\n')[0]


EXTRACTIONS = {
  'text': lambda text, marker: text,
  'last_line': lambda text, marker: _last_line(text),
  'boxed': lambda text, marker: last_boxed(text),
  'tag': lambda text, marker: last_tag(text),
  'marker': _marker_line,
}
