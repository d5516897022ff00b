"""ESS step: the step shrinks with the effective sample size of the batch, as in VCPO.

"Stable Asynchrony", Huang et al. (https://arxiv.org/abs/2602.17616).
Values of its scripts for MATH, without its off-policy baseline: `vcpo.py` has both.
Test: tests/unit/objectives/test_corrections.py::test_ess_step
"""

from configs import base


def get_config():
  """The base config with the boxes of the step scaling of VCPO."""
  config = base.get_config()
  config.name = 'ess_step'
  config.objective.advantage = 'group_std(ddof=1, eps=1e-6)'
  config.objective.trust_region = 'none'
  config.objective.corrections = (
    'sequence_tis(absolute_high=8.0)',
    'ess_step(on_policy_fraction=1.0, rule="sqrt")',
  )
  config.objective.aggregation = 'sequence_mean'
  return config
