"""NFT: likelihood of right answers, and of wrong ones under the policy they leave over.

"Bridging Supervised Learning and Reinforcement Learning in Math Reasoning", Chen et al.
(https://arxiv.org/abs/2505.18116).
Test: tests/unit/objectives/test_supervised.py::nft
"""

from configs import base


def get_config():
  """The base config with the boxes of NFT; the advantage is not read."""
  config = base.get_config()
  config.name = 'nft'
  config.objective.advantage = 'group_center'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = (
    'nft(correct_at=0.5, prompt_weight="linear", negative_weight=1.0, absolute_low=1.0)'
  )
  config.objective.aggregation = 'constant_norm'
  return config
