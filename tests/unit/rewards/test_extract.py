"""Numbers, boxes, markers and tags found in model text."""

import time
from decimal import Decimal

import pytest

from rlax_stack.rewards import extract


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('', []),
    ('no number', []),
    ('1 2 3', ['1', '2', '3']),
    ('it costs $1,234.50.', ['1234.50']),
    ('1,2,3', ['1', '2', '3']),
    ('12,345,678', ['12345678']),
    ('1,2345', ['1', '2345']),
    ('3-5', ['3', '5']),
    ('3 - 5', ['3', '5']),
    ('3 -5', ['3', '-5']),
    ('x=-5', ['-5']),
    ('(-5)-2', ['-5', '2']),
    ('-$7', ['-7']),
    ('\u22127', ['-7']),
    ('+4', ['4']),
    ('.5 and 0.25', ['.5', '0.25']),
    ('1e3 2.5E-2', ['1e3', '2.5E-2']),
    ('50%', ['50']),
  ],
)
def test_numbers_in(text, expected):
  assert extract.numbers_in(text) == [Decimal(value) for value in expected]


def test_numbers_in_is_linear_and_reads_the_end():
  start = time.monotonic()
  found = extract.numbers_in('1,111' * 50_000 + ',1 ' + '9' * 300 + ' 42')
  assert found[-1] == 42
  extract.numbers_in('1' + ',111' * 16_000 + '1')
  assert time.monotonic() - start < 5


@pytest.mark.parametrize(
  ('text', 'expected'),
  [(' 18 ', '18'), ('$1,000', '1000'), ('-3.5', '-3.5'), ('50%', '50'), ('7.', '7')],
)
def test_parse_number(text, expected):
  assert extract.parse_number(text) == Decimal(expected)


@pytest.mark.parametrize('text', ['', 'seven', '3/4', '1 2', '12 apples', '-'])
def test_parse_number_refuses_what_is_not_one_number(text):
  assert extract.parse_number(text) is None


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    (r'\boxed{1} then \boxed{x^{2}}', 'x^{2}'),
    (r'\boxed{}', ''),
    (r'\boxed{never closed', None),
    ('none', None),
  ],
)
def test_last_boxed(text, expected):
  assert extract.last_boxed(text) == expected


def test_after_marker_and_last_tag():
  assert extract.after_marker('a #### 1 #### 2', '####') == ' 2'
  assert extract.after_marker('a', '####') is None
  assert extract.last_tag('<answer>1</answer> <answer>2</answer> 3') == '2'
  assert extract.last_tag('<answer>1') is None
  assert extract.last_tag('<b>x</b>', 'b') == 'x'


@pytest.mark.parametrize(
  ('text', 'marker', 'expected'),
  [
    ('3 + 4 = 7', None, '7'),
    ('The answer is 12.', None, '12'),
    (r'so 5, \boxed{3 + 4 = 7} and 9', None, '7'),
    (r'\boxed{\frac{3}{4}}', None, '0.75'),
    (r'\boxed{-\dfrac{1}{8}}', None, '-0.125'),
    (r'\boxed{\$18}', None, '18'),
    (r'7 \boxed{x}', None, None),
    (r'\boxed{\frac{3}{0}}', None, '0'),
    ('2 #### 18 apples of 20', '####', '18'),
    ('18', '####', None),
    ('', None, None),
  ],
)
def test_answer_number(text, marker, expected):
  assert extract.answer_number(text, marker) == (None if expected is None else Decimal(expected))


@pytest.mark.parametrize(
  ('left', 'right', 'tolerance', 'expected'),
  [
    ('1', '1.0', 0, True),
    ('0.333333', '0.3333333333', 1e-6, True),
    ('0.33', '0.3333333333', 1e-6, False),
    ('1', '1.0000001', 0, False),
    ('9' * 80, '9' * 79 + '8', 0, False),
    ('1e999', '-1e999', 1e-6, False),
  ],
)
def test_numbers_equal(left, right, tolerance, expected):
  assert extract.numbers_equal(Decimal(left), Decimal(right), tolerance) is expected


@pytest.mark.parametrize(
  ('how', 'marker', 'expected'),
  [
    ('text', None, 'a\n<answer> b </answer>\nAnswer: c \\boxed{d}'),
    ('last_line', None, 'Answer: c \\boxed{d}'),
    ('boxed', None, 'd'),
    ('tag', None, 'b'),
    ('marker', 'Answer:', 'c \\boxed{d}'),
    ('marker', 'Solution:', None),
  ],
)
def test_extract_answer(how, marker, expected):
  text = 'a\n<answer> b </answer>\nAnswer: c \\boxed{d}\n\n'
  assert extract.extract_answer(text, how, marker) == expected


def test_extract_answer_of_nothing():
  assert extract.extract_answer('', 'last_line') is None
  assert extract.extract_answer('', 'text') == ''
