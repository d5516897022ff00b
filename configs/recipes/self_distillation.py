"""Self-distillation with privileged context: the policy, told the answer, teaches itself without it.

"Self-Distilled Reasoner: On-Policy Self-Distillation for Large Language Models", Zhao et al.
(https://arxiv.org/abs/2601.18734), in the form of the sampled token: each token's advantage is how much
likelier the same weights find it once they have read the answer. The template is ours.
Test: tests/unit/learner/test_other_context.py::test_scores_are_those_after_the_other_prompt
"""

from configs import base


def get_config():
  """The base config with a teacher that is the policy itself, with the answer in its prompt."""
  config = base.get_config()
  config.name = 'self_distillation'
  config.objective.advantage = 'teacher(coef=1.0, task_coef=0.0)'
  config.objective.trust_region = 'none'
  config.objective.aggregation = 'token_mean'
  config.learner.teacher_context = (
    '{prompt}\n\nThe correct answer is {answer}. Explain it as if you had found it yourself.'
  )
  return config
