"""Where a critic gets its values from: a head on the policy, or a model of its own.

Not for parameters or forward passes (learner/critic.py). Invariant: the value head starts at 0, so
the first advantages are those of no critic at all.
"""

import dataclasses
from typing import Annotated

from rlax_stack.objectives.boxes import Box, Range

_Positive = Annotated[float, Range(0.0)]
_Count = Annotated[int, Range(0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticSettings:
  """What a critic box says, all options of both; see `shared_trunk` and `separate`."""

  shared: bool
  coef: float
  trunk_coef: float = 0.0
  learning_rate: float
  updates: int = 1
  freeze_attention: bool = False
  delta_value: float
  pretrain_updates: int
  bootstrap: bool
  warm_start: str


def shared_trunk(
  *,
  coef: _Positive = 0.5,
  trunk_coef: _Positive = 1.0,
  learning_rate: _Positive = 0.0,
  delta_value: _Positive = 0.0,
  pretrain_updates: _Count = 0,
  bootstrap: bool = True,
  warm_start: str = '',
) -> CriticSettings:
  """A linear value head on the policy's final hidden states.

  V(s) = w·h(s) + b,  L = c Σₜ ½ max((Vₜ−V̂ₜ)², (clip(Vₜ, V°ₜ−δ, V°ₜ+δ)−V̂ₜ)²) / N

  V° the value at the start of the batch. Divided by: N, the trained tokens of the batch. Gradient
  flows through: Vₜ into w and b, and times `trunk_coef` into the policy's weights.
  See "Proximal Policy Optimization", Schulman et al. (https://arxiv.org/abs/1707.06347), where policy
  and value function share parameters; clipped as in its authors' code
  (https://github.com/openai/baselines, ppo2).

  Args:
    coef: c.
    trunk_coef: factor of the value loss's gradient in the policy's weights; 0 lets none through.
    learning_rate: of the head; 0 takes config.learner.learning_rate.
    delta_value: δ, a distance from V°; 0 does not clip.
    pretrain_updates: so many first updates move the head alone.
    bootstrap: whether a trajectory that was cut off goes on with the value of its last state; False
      lets it end there.
    warm_start: run folder or checkpoint whose critic is taken over; '' takes none.
  """
  return CriticSettings(
    shared=True,
    coef=coef,
    trunk_coef=trunk_coef,
    learning_rate=learning_rate,
    delta_value=delta_value,
    pretrain_updates=pretrain_updates,
    bootstrap=bootstrap,
    warm_start=warm_start,
  )


def separate(
  *,
  coef: _Positive = 1.0,
  learning_rate: _Positive = 0.0,
  updates: Annotated[int, Range(1)] = 1,
  freeze_attention: bool = False,
  delta_value: _Positive = 0.0,
  pretrain_updates: _Count = 0,
  bootstrap: bool = True,
  warm_start: str = '',
) -> CriticSettings:
  """A model of its own: the policy's starting weights without LM head, and a linear value head.

  V(s) = w·h_V(s) + b,  L = c Σₜ ½ max((Vₜ−V̂ₜ)², (clip(Vₜ, V°ₜ−δ, V°ₜ+δ)−V̂ₜ)²) / N

  V° the value at the start of the batch. Divided by: N, the trained tokens of the batch. Gradient
  flows through: Vₜ into the critic's weights; the policy has no part in it.
  See "VAPO", Yue et al. (https://arxiv.org/abs/2504.05118), for value pre-training; "Single-Rollout
  Asynchronous Optimization", Hou et al. (https://arxiv.org/abs/2607.07508), for several updates and
  frozen attention; "Learning to summarize from human feedback", Stiennon et al.
  (https://arxiv.org/abs/2009.01325), for a model of its own.

  Args:
    coef: c.
    learning_rate: of all its weights; 0 takes config.learner.learning_rate.
    updates: of the critic for every update of the policy, all towards the same targets.
    freeze_attention: whether its attention projections stay as they started.
    delta_value: δ, a distance from V°; 0 does not clip.
    pretrain_updates: so many first updates leave the policy as it is.
    bootstrap: whether a trajectory that was cut off goes on with the value of its last state; False
      lets it end there.
    warm_start: run folder or checkpoint whose critic is taken over; '' takes none.
  """
  return CriticSettings(
    shared=False,
    coef=coef,
    learning_rate=learning_rate,
    updates=updates,
    freeze_attention=freeze_attention,
    delta_value=delta_value,
    pretrain_updates=pretrain_updates,
    bootstrap=bootstrap,
    warm_start=warm_start,
  )


_LOSS = '+ {coef:g}·½(V − V̂)²'

TABLE = {
  'shared_trunk': Box(shared_trunk, formula=_LOSS),
  'separate': Box(separate, formula=_LOSS),
}
