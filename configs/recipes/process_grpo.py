"""GRPO with process supervision: rewards of steps, standardised over the group and summed to go.

"DeepSeekMath", Shao et al. (https://arxiv.org/abs/2402.03300), section 4.1.3. Its rewards of steps are
those of a trained model; here a line of the answer is a step, judged by a rule.
Test: tests/unit/objectives/test_process_rewards.py::test_process_supervision
"""

from ml_collections import ConfigDict

from configs import base


def get_config():
  """The base config with the boxes of GRPO for rewards of steps."""
  config = base.get_config()
  config.name = 'process_grpo'
  config.rewards.verifiers.steps = ConfigDict(
    {'name': 'step_format', 'pattern': r'\d', 'weight': 0.1}
  )
  config.objective.advantage = 'step_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('kl_anchor(coef=0.04, estimator="k3")',)
  config.objective.aggregation = 'sequence_mean'
  return config
