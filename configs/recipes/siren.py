"""SIREN: the nucleus entropy of the most uncertain tokens is held where it was at the start.

"Rethinking Entropy Regularization in Large Reasoning Models", Jiang et al.
(https://arxiv.org/abs/2509.25133). Values of the entropy term from the script of its code.
Test: tests/unit/objectives/test_vocabulary_boxes.py::test_peak_entropy_of_the_nucleus
"""

from configs import base


def get_config():
  """The base config with the boxes of SIREN."""
  config = base.get_config()
  config.name = 'siren'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.regularisers = ('peak_entropy(coef=0.005, quantile=0.8, top_p=0.8)',)
  config.objective.aggregation = 'token_mean'
  return config
