"""Off-policy BoN: the best of k samples, corrected for samples of another policy.

"The Best of N Worlds", Bagirov et al. (https://arxiv.org/abs/2510.23393), its off-policy form.
Three updates of a batch, as there.
Test: tests/unit/objectives/test_off_policy_best_of_k.py::test_rewards_are_sums_over_all_sets
"""

from configs import base


def get_config():
  """The base config with the boxes of off-policy BoN."""
  config = base.get_config()
  config.name = 'off_policy_bon'
  config.objective.advantage = 'off_policy_max_at_k(k=2, delta=0.2)'
  config.objective.trust_region = 'reinforce'
  config.objective.corrections = ()
  config.objective.regularisers = ('kl_anchor(coef=0.01, estimator="k3")',)
  config.objective.aggregation = 'sequence_mean'
  config.learner.updates_per_batch = 3
  return config
