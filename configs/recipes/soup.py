"""SOUP: samples that begin as an earlier policy's sample did, each token's ratio to the policy that drew it.

"SOUP: Token-level Single-sample Mix-policy Reinforcement Learning for Large Language Models", Yang et al.
(https://arxiv.org/abs/2601.21476). The shares of samples and tokens are ours.
Test: tests/unit/rollout/strategies/test_replay.py::test_what_is_taken_over
"""

from configs import base


def get_config():
  """The base config with the samples and boxes of SOUP."""
  config = base.get_config()
  config.name = 'soup'
  config.rollout.strategy = 'replay(replayed=0.5, fractions=(0.25, 0.5, 0.75))'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
