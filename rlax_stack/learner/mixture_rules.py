"""What a learner asks of a mixture of experts before it allocates anything."""

from jax.sharding import Mesh

from rlax_stack.errors import ConfigError
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.router import RouterLoss


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
