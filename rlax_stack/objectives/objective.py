"""An objective: one box per slot, resolved once from the strings of a config.

Not for computing: `advantages_of` (host.py) and `policy_loss` (loss.py) do that. Invariant: an
`Objective` is complete and checked, hashable, and equal objectives share compiled programs.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlax_stack.errors import ConfigError
from rlax_stack.objectives import (
  advantages,
  aggregation,
  corrections,
  critics,
  ratios,
  regularisers,
  shaping,
  trust_regions,
)
from rlax_stack.objectives.boxes import BoundBox, Table, bind, keyword_only
from rlax_stack.objectives.critics.networks import CriticSettings

TABLES: Mapping[str, Table] = {
  'shaping': shaping.TABLE,
  'advantage': advantages.TABLE,
  'critic': critics.TABLE,
  'ratio': ratios.TABLE,
  'trust_region': trust_regions.TABLE,
  'corrections': corrections.TABLE,
  'regularisers': regularisers.TABLE,
  'aggregation': aggregation.TABLE,
}

_AUTO = 'token_tis(absolute_high=2.0)'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """The boxes of one objective, in the order they are applied."""

  shaping: tuple[BoundBox, ...]
  advantage: BoundBox
  ratio: BoundBox
  trust_region: BoundBox
  corrections: tuple[BoundBox, ...]
  regularisers: tuple[BoundBox, ...]
  aggregation: BoundBox
  critic: BoundBox | None = None

  @property
  def critic_settings(self) -> CriticSettings | None:
    """What the critic's box says; None without a critic."""
    return None if self.critic is None else self.critic()

  @property
  def device_boxes(self) -> dict[str, BoundBox]:
    """The boxes of the loss by slot ('regularisers/0', ...): the keys of statistics and state."""
    lists = {'corrections': self.corrections, 'regularisers': self.regularisers}
    several = {f'{slot}/{i}': box for slot, boxes in lists.items() for i, box in enumerate(boxes)}
    single = {
      'advantage': self.advantage,
      'ratio': self.ratio,
      'trust_region': self.trust_region,
    }
    return single | several

  @property
  def host_boxes(self) -> dict[str, BoundBox]:
    """The boxes that run before packing, by slot ('shaping/0', ...), in order."""
    shaping = {f'shaping/{i}': bound for i, bound in enumerate(self.shaping)}
    return shaping | {'advantage': self.advantage}

  @property
  def boxes(self) -> tuple[BoundBox, ...]:
    """Every box."""
    critic = () if self.critic is None else (self.critic,)
    return (*self.shaping, *self.device_boxes.values(), self.aggregation, *critic)

  @property
  def tags(self) -> frozenset[str]:
    """The tags of all boxes together."""
    return frozenset[str]().union(*(bound.box.tags for bound in self.boxes))

  @property
  def needs_scores(self) -> bool:
    """Whether some box wants to see the whole batch under the current weights first."""
    hooked = [b.box for b in self.boxes if b.box.batch_statistics or b.box.token_advantages]
    return any('unscored' not in box.tags for box in hooked)

  @property
  def needs_gradient_norms(self) -> bool:
    """Whether the advantages weigh by the size of each trajectory's gradient."""
    hook = self.advantage.box.token_advantages
    return hook is not None and 'gradient_norms' in keyword_only(hook)

  @property
  def average_decay(self) -> float | None:
    """The decay of the averaged weights that are the proximal policy; None where none are kept."""
    bound = self.ratio
    return bound.call(bound.box.average) if bound.box.average is not None else None

  def init_state(self) -> dict[str, Any]:
    """What the boxes carry from step to step, by slot; empty for most objectives."""
    stateful = {k: b for k, b in self.device_boxes.items() if b.box.init_state is not None}
    return {slot: bound.call(bound.box.init_state) for slot, bound in stateful.items()}

  def update_state(self, state: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """The state after an update whose metrics (float32 scalars) these are."""
    updated = dict(state)
    for slot, bound in self.device_boxes.items():
      if bound.box.update_state is not None:
        updated[slot] = bound.call(bound.box.update_state, state[slot], metrics)
    return updated

  def init_host_state(self) -> dict[str, Any]:
    """What the boxes on the host carry from batch to batch, by slot: a JSON object, mostly empty."""
    stateful = {k: b for k, b in self.host_boxes.items() if b.box.host_state is not None}
    return {slot: bound.call(bound.box.host_state) for slot, bound in stateful.items()}

  @property
  def formula(self) -> str:
    """One line: the loss, then what its symbols stand for."""
    weight = ' · '.join(bound.formula for bound in self.corrections)
    loss = f'[{self.trust_region.formula}]'
    if weight:
      loss = f'{weight} · {loss}'
    mean = self.aggregation.box.formula.format(loss=loss, **dict(self.aggregation.options))
    added = [bound.formula for bound in self.regularisers]
    if self.critic is not None:
      added.append(self.critic.formula)
    terms = ' '.join([f'L = {mean}', *added])
    symbols = [] if 'no_ratio' in self.trust_region.box.tags else [self.ratio.formula]
    if re.search(r'\bw\b', terms):
      symbols.append('w = π_proximal/π_behaviour')
    if re.search(r'\bu\b', terms):
      symbols.append('u = π/π_behaviour')
    symbols += [self.advantage.formula, *(bound.formula for bound in self.shaping)]
    return f'{terms};  {",  ".join(symbols)}'


def resolve(
  *,
  shaping: Sequence[str] = (),
  advantage: str = 'group_center',
  ratio: str = 'token',
  trust_region: str = 'ppo_clip',
  corrections: Sequence[str] = ('auto',),
  regularisers: Sequence[str] = (),
  aggregation: str = 'token_mean',
  critic: str = 'none',
  off_policy: bool = False,
  max_tokens: int = 0,
) -> Objective:
  """The objective that the strings of config.objective name.

  Args:
    shaping: see docs/config.md, as all that follow.
    advantage: one box.
    ratio: one box.
    trust_region: one box.
    corrections: boxes in order; 'auto' is token_tis(absolute_high=2) where `off_policy` holds and
      the ratio is not against behaviour, or where it is against averaged weights, and nothing
      otherwise.
    regularisers: boxes in order.
    aggregation: one box.
    critic: one box, or 'none'.
    off_policy: whether samples may be stale or drawn by quantised weights, or a batch gets several updates.
    max_tokens: config.rollout.max_tokens, for options of that name that are left at 0.

  Raises:
    ConfigError: an unknown box or option, a value of another type, or boxes that contradict.
  """
  fill = {'max_tokens': max_tokens}

  def one(slot: str, text: str) -> BoundBox:
    return bind(text, TABLES[slot], f'config.objective.{slot}', fill=fill)

  def many(slot: str, texts: Sequence[str]) -> tuple[BoundBox, ...]:
    return tuple(one(slot, text) for text in texts)

  bound_ratio = one('ratio', ratio)
  if 'auto' in corrections:
    if len(corrections) > 1:
      raise ConfigError(
        f"config.objective.corrections mixes 'auto' with others, got {tuple(corrections)!r}. "
        'Name every correction, or auto alone.'
      )
    base = dict(bound_ratio.options).get('base')
    weighted = off_policy and base != 'behaviour' or base == 'ema'
    corrections = (_AUTO,) if weighted else ()
  objective = Objective(
    shaping=many('shaping', shaping),
    advantage=one('advantage', advantage),
    ratio=bound_ratio,
    trust_region=one('trust_region', trust_region),
    corrections=many('corrections', corrections),
    regularisers=many('regularisers', regularisers),
    aggregation=one('aggregation', aggregation),
    critic=None if critic.strip() == 'none' else one('critic', critic),
  )
  _check(objective)
  return objective


def _check(objective: Objective) -> None:
  """Refuses boxes that contradict each other."""
  base = dict(objective.ratio.options).get('base')
  masks = [
    bound.name
    for bound in (objective.trust_region, *objective.corrections)
    if 'token_mask' in bound.box.tags
  ]
  if 'pooled' in objective.ratio.box.tags and masks:
    raise ConfigError(
      f'config.objective.ratio={objective.ratio.name} is one ratio for many tokens, but {masks[0]} '
      'drops single tokens by their own ratio, which leaves the pooled ratio without a meaning. Set '
      'config.objective.ratio to token, or take a correction of the whole sequence.'
    )
  weights = [bound.name for bound in objective.corrections if 'importance' in bound.box.tags]
  if base == 'behaviour' and weights and 'no_ratio' not in objective.trust_region.box.tags:
    raise ConfigError(
      f'config.objective.ratio is against behaviour, and {weights[0]} weighs by proximal / behaviour '
      "once more. Set the ratio's base to proximal, or drop the correction."
    )
  if objective.trust_region.box.proximal_vocabulary and base in ('behaviour', 'log_linear'):
    raise ConfigError(
      f'{objective.trust_region.name} compares whole distributions with those of the proximal policy, '
      f'but config.objective.ratio has base {base!r}, of which only log-probs of sampled tokens are '
      "known. Set the ratio's base to proximal or ema."
    )
  _check_critic(objective)
  keys = [bound.name for bound in objective.regularisers]
  if len(set(keys)) < len(keys):
    raise ConfigError(f'config.objective.regularisers names a box twice, got {keys}.')


def _check_critic(objective: Objective) -> None:
  """Refuses an estimator without its critic, and a critic that no estimator reads."""
  name, reads = objective.advantage.name, 'critic' in objective.advantage.box.tags
  if reads and objective.critic is None:
    raise ConfigError(
      f'config.objective.advantage={name} reads the values of a critic, but config.objective.critic '
      'is none. Set it to separate or shared_trunk, or choose an estimator without a critic, such as '
      'group_center.'
    )
  if objective.critic is not None and not reads:
    raise ConfigError(
      f'config.objective.critic={objective.critic.name} would be trained, but '
      f'config.objective.advantage={name} does not read its values. Set config.objective.critic to '
      'none, or config.objective.advantage to gae, length_adaptive_gae or vtrace.'
    )
