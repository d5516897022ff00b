"""On-policy distillation: the policy's own samples, graded token by token by a stronger model.

"On-Policy Distillation", Lu and Thinking Machines Lab
(https://thinkingmachines.ai/blog/on-policy-distillation/), after "On-Policy Distillation of Language
Models", Agarwal et al. (https://arxiv.org/abs/2306.13649). Set config.learner.teacher to a model with
the same tokens; no verifier's reward is used. Values are those of its description: β = 1, discount 0.
Test: tests/unit/objectives/test_teacher.py::test_advantages_are_log_ratios_to_the_sampler
"""

from configs import base


def get_config():
  """The base config with the boxes of on-policy distillation."""
  config = base.get_config()
  config.name = 'on_policy_distillation'
  config.objective.advantage = 'teacher(coef=1.0, task_coef=0.0)'
  config.objective.trust_region = 'none'
  config.objective.aggregation = 'token_mean'
  config.rollout.group_size = 4
  config.learner.teacher = (
    config.model.path
  )  # the starting weights, until a stronger model is named
  return config
