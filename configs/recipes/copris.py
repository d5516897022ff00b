"""CoPRIS: each part of a partial rollout is compared with the version that sampled it.

"CoPRIS", Qu et al. (https://arxiv.org/abs/2511.05589): its cross-stage correction.
Clip bounds of the base config, not checked against the paper.
Test: tests/unit/objectives/test_corrections.py::test_parts_of_a_partial_rollout
"""

from configs import base


def get_config():
  """The base config with the boxes of the cross-stage correction of CoPRIS."""
  config = base.get_config()
  config.name = 'copris'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'token(base="behaviour")'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.aggregation = 'token_mean'
  return config
