"""Sequence MIS: weighed by the ratio of the whole sequence, dropped outside the bounds.

"When Speed Kills Stability", Liu et al. (https://richardli.xyz/rl-collapse).
Bounds of the preset decoupled_seq_is_rs of verl.
Test: tests/unit/objectives/test_corrections.py::_product
"""

from configs import base


def get_config():
  """The base config with the boxes of masked importance sampling."""
  config = base.get_config()
  config.name = 'sequence_mis'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.corrections = (
    'product_mask(absolute_low=0.5, absolute_high=2.0)',
    'sequence_tis(absolute_high=2.0)',
  )
  config.objective.aggregation = 'token_mean'
  return config
