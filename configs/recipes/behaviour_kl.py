"""Behaviour KL: a squared log-ratio on every token, also where the clip has cut the gradient off.

prime-rl (https://github.com/PrimeIntellect-ai/prime-rl), trainer/rl/loss.py.
Only the term: its trust region is another one.
Test: tests/unit/objectives/test_regularisers.py::test_behaviour_term_is_the_squared_log_ratio_of_prime_rl
"""

from configs import base


def get_config():
  """The base config with the boxes of a clipped surrogate with the KL term of prime-rl."""
  config = base.get_config()
  config.name = 'behaviour_kl'
  config.objective.advantage = 'group_center'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.regularisers = ('kl_behaviour(coef=0.002, estimator="k2")',)
  config.objective.aggregation = 'token_mean'
  return config
