"""Box strings: what is read, what is refused and what the message says; the formula line."""

import inspect
from typing import Annotated, Literal

import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.objectives.boxes import BoundBox, Box, Range, bind, keyword_only
from rlax_stack.objectives.objective import resolve


def sample(value, *, size: Annotated[int, Range(1, 4)] = 2, kind: Literal['a', 'b'] = 'a',
           scale: float | None = None, levels: tuple[float, ...] = (), flag: bool = False):  # fmt: skip
  """A box that gives back what it was called with."""
  return value, size, kind, scale, levels, flag


def start(*, scale: float | None = None, rate: float = 0.5):
  """A hook with an option of its own."""
  return scale, rate


TABLE = {
  'sample': Box(sample, formula='{size}·x', init_state=start),
  'simple': Box(start, formula=''),
}


def _bind(text, **fill):
  return bind(text, TABLE, 'config.objective.slot', fill=fill)


def test_options_are_filled_in_and_handed_to_who_names_them():
  bound = _bind(' sample(levels=[1, 2.5], kind="b", scale=3, rate=1) ')
  assert isinstance(bound, BoundBox) and hash(bound) == hash(_bind(bound.text))
  assert bound('x') == ('x', 2, 'b', 3.0, (1.0, 2.5), False)
  assert bound.call(bound.box.init_state, state='not named') == (3.0, 1.0)
  assert bound.formula == '2·x'
  assert _bind('sample(size=3)').text.startswith('sample(size=3, kind=')
  with pytest.raises(ConfigError, match='no such part'):
    bound.call(None)


def test_an_option_left_at_zero_is_filled_from_the_run():
  table = {'b': Box(lambda *, max_tokens=0: max_tokens, formula='')}
  table['b'].function.__annotations__['max_tokens'] = int
  assert bind('b', table, 'x', fill={'max_tokens': 7})() == 7
  assert bind('b(max_tokens=3)', table, 'x', fill={'max_tokens': 7})() == 3


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('sampel', "slot names no box 'sampel'. There are: sample, simple"),
    ('sample(sise=1)', "sample has no option 'sise'. There are: size, "),
    ('sample(size="big")', "size of sample must be a int, got 'big'"),
    ('sample(size=True)', 'size of sample must be a int, got True'),
    ('sample(size=9)', 'size of sample must be from 1 to 4, got 9'),
    ('sample(kind="c")', "kind of sample must be one of 'a', 'b', got 'c'"),
    ('sample(scale="x")', "scale of sample must be a float or None, got 'x'"),
    ('sample(levels=(1, "x"))', 'levels of sample must be a tuple of a float'),
    ('sample(flag=1)', 'flag of sample must be a bool, got 1'),
    ('sample(3)', 'is not the name of a box'),
    ('sample(size=1, size=2)', 'is not the name of a box'),
    ('sample(**{})', 'is not the name of a box'),
    ('sample(size=open("x"))', 'cannot be read'),
    ('sample.function', 'is not the name of a box'),
    ('sample(', 'cannot be read'),
    ('', 'cannot be read'),
    ('(' * 500, 'cannot be read'),
    ('\0', 'cannot be read'),
  ],
)
def test_what_cannot_be_is_refused(text, message):
  with pytest.raises(ConfigError, match=message.replace('(', r'\(').replace(')', r'\)')):
    _bind(text)


def test_nan_is_in_no_range():
  with pytest.raises(ConfigError, match='delta_low of ppo_clip must be from 0 to 1, got inf'):
    resolve(trust_region='ppo_clip(delta_low=1e999)')


def test_formula_is_one_line_with_every_symbol():
  objective = resolve(
    advantage='group_std',
    shaping=('overlong_penalty',),
    regularisers=('kl_anchor(coef=0.04)', 'entropy_bonus'),
    off_policy=True,
    max_tokens=64,
  )
  assert objective.formula == (
    'L = Σₜ min(w, 2) · [max(−ρA, −clip(ρ, 1−0.2, 1+0.28)A)] / N + 0.04·KL(π‖anchor; k3_plus) '
    '− 0.001·H;  ρ = π/π_proximal,  w = π_proximal/π_behaviour,  A = (R − μ_g)/(s_g + 1e-06),  '
    'R −= 1·overlong(L=64, b=0.2·L)'
  )
  assert 'ρ' not in resolve(trust_region='reinforce').formula


def test_a_hook_gets_the_options_and_extras_that_it_names():
  def function(*, scale: float = 2.0, vocabulary):
    return scale, vocabulary

  def hook(value, *, proximal, size: int = 3):
    return value, proximal, size

  assert keyword_only(hook) == {'proximal': inspect.Parameter.empty, 'size': 3}
  box = Box(function, formula='x', vocabulary=hook)
  bound = bind('sample(size=5)', {'sample': box}, 'here')
  assert bound.options == (('scale', 2.0), ('size', 5))
  assert bound(vocabulary='v', proximal='p') == (2.0, 'v')
  assert bound.call(box.vocabulary, 1, vocabulary='v', proximal='p') == (1, 'p', 5)


def test_auto_corrects_off_policy_only():
  assert resolve().corrections == ()
  assert [bound.text for bound in resolve(off_policy=True).corrections] == [
    'token_tis(absolute_high=2.0)'
  ]
  assert resolve(off_policy=True, ratio='token(base="behaviour")').corrections == ()
  assert resolve(ratio='token(base="ema")').corrections[0].name == 'token_tis'


def test_an_estimator_that_needs_a_critic_is_refused(monkeypatch):
  from rlax_stack.objectives import advantages

  box = Box(lambda batch: batch.reward, formula='A', tags=frozenset({'critic'}))
  monkeypatch.setitem(advantages.TABLE, 'needs_critic', box)
  with pytest.raises(ConfigError, match='needs_critic reads the values of a critic'):
    resolve(advantage='needs_critic')
