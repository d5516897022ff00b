"""PPO-EWMA: clipped against an average of the past weights, weighed against the behaviour policy.

"Batch size-invariance for policy optimization", Hilton et al. (https://arxiv.org/abs/2110.00641).
The average is scored before every update. Its code caps π/π_behaviour at 100; here w is capped.
Test: tests/unit/learner/test_ema_proximal.py::test_proximal_scores_are_those_of_the_averaged_weights
"""

from configs import base


def get_config():
  """The base config with the boxes of PPO-EWMA."""
  config = base.get_config()
  config.name = 'ppo_ewma'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.ratio = 'token(base="ema", decay=0.889)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.corrections = ('token_tis(absolute_high=5.0)',)
  config.objective.aggregation = 'token_mean'
  config.learner.updates_per_batch = 2
  return config
