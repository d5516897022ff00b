"""How the samples of a group are drawn: one small object by name, driven by whoever owns an engine.

A strategy makes a plan for each group; a plan asks for samples and turns finished ones into trajectories, or into
further requests. Whoever drives it (the worker, an evaluation) knows nothing of how.
"""

from rlax_stack.objectives.boxes import Box, bind
from rlax_stack.rollout.strategies.delethink import Delethink
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.rollout.strategies.plan import Strategy
from rlax_stack.rollout.strategies.prefix import Prefix
from rlax_stack.rollout.strategies.replay import Replay
from rlax_stack.rollout.strategies.tree import Tree

TABLE = {
  'independent': Box(Independent, formula='every sample from the prompt'),
  'tree': Box(Tree, formula='{roots} trees'),
  'prefix': Box(Prefix, formula='{guided:g} of the samples after a given prefix'),
  'replay': Box(Replay, formula="{replayed:g} of the samples after a past one's beginning"),
  'delethink': Box(Delethink, formula='chunks of {chunk}, {carry} carried over'),
}


def make_strategy(text: str) -> Strategy:
  """The strategy that `config.rollout.strategy` names, `name` or `name(option=value, ...)`.

  Raises:
    ConfigError: an unknown name or option, or a value of another type or range.
  """
  return bind(text, TABLE, 'config.rollout.strategy')()


def trains_on_the_past(strategy: Strategy) -> bool:
  """Whether tokens that an earlier policy sampled are trained on, at max_staleness 0 too."""
  return isinstance(strategy, Replay) and strategy.trains_on_the_past
