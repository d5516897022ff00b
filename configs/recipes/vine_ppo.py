"""VinePPO: a step is worth what Monte-Carlo rollouts after it get more than those before it.

"VinePPO", Kazemnejad et al. (https://arxiv.org/abs/2410.01679). The paper starts rollouts at every
step, here from at most two steps of each sample; a step ends with a line.
Test: tests/unit/objectives/test_trees.py::test_vine
"""

from configs import base


def get_config():
  """The base config with the samples and boxes of VinePPO."""
  config = base.get_config()
  config.name = 'vine_ppo'
  config.rollout.group_size = 28  # 4 samples that train, and for each of them 2 x 3 rollouts
  config.rollout.strategy = (
    r'tree(roots=4, at="step", by="spread", per_point=3, trains="roots", separator="\n")'
  )
  config.objective.advantage = 'vine()'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('kl_anchor(coef=1e-4, estimator="k3")',)
  config.objective.aggregation = 'token_mean'
  return config
