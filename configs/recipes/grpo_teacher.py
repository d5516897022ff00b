"""GRPO with a pull to a teacher: the group's rewards decide, a stronger model steadies.

The KL term of GRPO ("DeepSeekMath", Shao et al., https://arxiv.org/abs/2402.03300) taken to a teacher
instead of to the starting weights, as in "KDRL", Xu et al. (https://arxiv.org/abs/2506.02208), whose
k2 estimator it takes. Set config.learner.teacher to a model with the same tokens. The coefficient is ours.
Test: tests/unit/objectives/test_regularisers.py::test_kl
"""

from configs import base


def get_config():
  """The base config with GRPO's boxes and a KL to the teacher."""
  config = base.get_config()
  config.name = 'grpo_teacher'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.2)'
  config.objective.regularisers = ('kl_teacher(coef=0.002, estimator="k2")',)
  config.objective.aggregation = 'token_mean'
  config.learner.teacher = (
    config.model.path
  )  # the starting weights, until a stronger model is named
  return config
