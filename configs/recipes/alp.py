"""ALP: every token costs, the more the easier the prompt is for the policy.

"Just Enough Thinking", Xiang et al. (https://arxiv.org/abs/2506.05256). The weight is larger than the
paper's, which stays below the epsilon that the deviation of a group is divided with here.
Test: tests/unit/objectives/test_group_estimators.py::test_adaptive_length_by_hand
"""

from configs import base


def get_config():
  """The base config with the boxes of GRPO on rewards that pay for length."""
  config = base.get_config()
  config.name = 'alp'
  config.objective.shaping = ('adaptive_length(coef=0.1)',)
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
