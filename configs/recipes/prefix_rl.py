"""PrefixRL: half of each group goes on from the first half of a solution, compared among themselves.

"Reuse your FLOPs: Scaling RL on Hard Problems by Conditioning on Very Off-Policy Prefixes", Setlur et al.
(https://arxiv.org/abs/2601.18795). The paper's prefixes are of traces that were sampled and found right;
here they are of the solutions that come with GSM8K. The other half is unguided, as in POPE.
Test: tests/unit/objectives/test_trees.py::test_start_std
"""

from configs import base


def get_config():
  """The base config with the samples and boxes of PrefixRL."""
  config = base.get_config()
  config.name = 'prefix_rl'
  config.data.train = base.source(kind='gsm8k', path='gsm8k', split='train', size=0)
  config.data.eval = base.source(kind='gsm8k', path='gsm8k', split='test', size=64)
  config.rollout.strategy = 'prefix(guided=0.5, fractions=(0.5,), field="solution")'
  config.objective.advantage = 'start_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'
  config.objective.aggregation = 'token_mean'
  return config
