"""VCPO: a baseline of least variance for stale samples, and a step that shrinks where few of them count.

"Stable Asynchrony", Huang et al. (https://arxiv.org/abs/2602.17616). Values of its scripts for MATH.
The baseline costs a backward pass for every trajectory.
Test: tests/unit/learner/test_gradient_norms.py::test_norms_are_those_of_separate_gradients
"""

from configs import base


def get_config():
  """The base config with the boxes of VCPO."""
  config = base.get_config()
  config.name = 'vcpo'
  config.objective.advantage = 'minimum_variance(by_std=True)'
  config.objective.trust_region = 'none'
  config.objective.corrections = (
    'sequence_tis(absolute_high=8.0)',
    'ess_step(on_policy_fraction=1.0, rule="sqrt")',
  )
  config.objective.aggregation = 'sequence_mean'
  return config
