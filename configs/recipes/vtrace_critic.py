"""V-trace: a critic trained towards the current policy from stale samples, with bounded traces.

"IMPALA", Espeholt et al. (https://arxiv.org/abs/1802.01561); one trunk for policy and critic, both
bounds 1.
Test: tests/unit/objectives/test_critic_estimators.py::test_vtrace_is_that_of_a_loop
"""

from configs import base


def get_config():
  """The base config with the boxes of IMPALA."""
  config = base.get_config()
  config.name = 'vtrace_critic'
  config.objective.advantage = 'vtrace(absolute_rho_high=1.0, absolute_c_high=1.0)'
  config.objective.critic = 'shared_trunk(coef=0.5)'
  config.objective.trust_region = 'reinforce'
  config.objective.corrections = ('token_tis(absolute_high=1.0)',)
  config.objective.aggregation = 'token_mean'
  return config
