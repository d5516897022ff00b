"""PR-Clip-Delta: rewards of steps that repeating a step cannot farm, beside the reward of success.

"On Designing Effective RL Reward at Training Time for LLM Reasoning", Gao et al.
(https://arxiv.org/abs/2410.15115). Its rewards of steps are those of a trained model and its estimator is
PPO's; here a line of the answer is a step, judged by a rule, and returns to go are standardised over the
batch.
Test: tests/unit/objectives/test_process_rewards.py::test_process_clip_and_delta_by_hand
"""

from ml_collections import ConfigDict

from configs import base


def get_config():
  """The base config with rewards of steps, refined by Clip and then Delta."""
  config = base.get_config()
  config.name = 'pr_clip_delta'
  config.rewards.verifiers.steps = ConfigDict(
    {'name': 'step_format', 'pattern': r'\d', 'weight': 0.1}
  )
  config.objective.shaping = ('process_clip(absolute_high=0.1)', 'process_delta')
  config.objective.advantage = 'reinforce_pp(gamma=1.0, kl_coef=0.01)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.aggregation = 'token_mean'
  return config
