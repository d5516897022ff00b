"""Peak entropy: the most uncertain tokens are held at the entropy that they had at the start.

"Rethinking Entropy Regularization in Large Reasoning Models" (https://arxiv.org/abs/2509.25133).
SIREN without its top-p mask, an ablation of the authors: the entropy is that of the whole
vocabulary.
Test: tests/unit/objectives/test_regularisers.py::test_peak_entropy
"""

from configs import base


def get_config():
  """The base config with the boxes of SIREN without its top-p mask."""
  config = base.get_config()
  config.name = 'peak_entropy'
  config.objective.advantage = 'group_center'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.regularisers = ('peak_entropy(coef=0.005, quantile=0.8, top_p=1.0)',)
  config.objective.aggregation = 'token_mean'
  return config
