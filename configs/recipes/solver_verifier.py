"""Solver and verifier: answers, and verdicts on them that are rewarded by agreement with the rule, trained together.

In the manner of "RL Tango", Zha et al. (https://arxiv.org/abs/2505.15034), whose verifier judges every step where this
one judges whole answers. Both roles have weights of their own; config.roles.policy='' shares one set.
Test: tests/unit/rollout/strategies/test_verdicts.py::test_the_verifier_gets_agreement_and_the_solver_what_verdicts_add
"""

from ml_collections import ConfigDict

from configs import base


def get_config():
  """The base config with a verifier; verdicts are worth half of a correct answer to the solver."""
  config = base.get_config()
  config.name = 'solver_verifier'
  config.objective.advantage = 'group_std()'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.roles.kind = 'verifier'
  config.roles.policy = 'verifier'
  config.roles.answers = config.rollout.group_size
  config.roles.weight = 0.5
  config.policies.verifier = ConfigDict({'learner': ConfigDict({'learning_rate': 1e-6})})
  return config
