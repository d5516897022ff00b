"""Tunables of the learner, and what they demand of model and mesh."""

import dataclasses

from jax.sharding import Mesh

from rlax_stack.errors import ConfigError
from rlax_stack.learner.optimizer import OptimizerSettings
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.objective import Objective
from rlax_stack.objectives.router import NO_ROUTER_LOSS, RouterLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
  """Tunables of the learner.

  updates_per_batch: optimizer updates on each batch (the μ of GRPO); above 1 the proximal log-probs
  are scored first, and averaged weights score them before every update. max_skipped_in_row: so many
  non-finite updates in a row stop the run. router: losses of a mixture of experts. meeting_deadline_s:
  in a job of several processes, how long one waits for the others before a batch.
  """

  rows: RowPlan
  forward: ForwardSettings
  objective: Objective
  optimizer: OptimizerSettings
  updates_per_batch: int = 1
  max_skipped_in_row: int = 5
  router: RouterLoss = NO_ROUTER_LOSS
  meeting_deadline_s: float = 300.0

  @property
  def scores_proximal(self) -> bool:
    """Whether the proximal policy is scored by itself: it is another one than the current policy."""
    return self.updates_per_batch > 1 or self.objective.average_decay is not None


def check_mixture(config: ModelConfig, router: RouterLoss, mesh: Mesh) -> None:
  """Raises ConfigError for a dense model with what belongs to experts, or experts that do not divide over the mesh."""
  parts = mesh.shape['expert']
  if not config.num_experts:
    for name in ('aux_coef', 'z_coef'):
      if getattr(router, name):
        raise ConfigError(
          f'config.learner.router_{name}={getattr(router, name)} is for mixtures of experts, and this model is dense. '
          'Set it to 0.'
        )
    if parts > 1:
      raise ConfigError(
        f'config.learner.mesh.expert={parts} splits experts, and this model is dense. Set it to 1.'
      )
  elif config.num_experts % parts:
    raise ConfigError(
      f'config.learner.mesh.expert={parts} does not divide the {config.num_experts} experts of this model. Choose a '
      'divisor.'
    )
