"""Delethink: thinking in chunks, with the context set back to the prompt and a short carry-over after each.

"The Markovian Thinker", Aghajohari et al. (https://arxiv.org/abs/2510.06557). All chunks of a sample have
its one advantage, and its tokens are averaged over all of them.
Test: tests/unit/rollout/strategies/test_delethink.py::test_chunks_are_sampled_after_prompt_and_carry_over
"""

from configs import base


def get_config():
  """The base config with the samples and boxes of Delethink."""
  config = base.get_config()
  config.name = 'delethink'
  config.rollout.max_tokens = 512  # in all
  config.rollout.strategy = 'delethink(chunk=128, carry=64)'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'sequence_mean'
  return config
