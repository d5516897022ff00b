"""Advantages from a teacher: how much likelier it finds each token than the policy that sampled it.

Not a term of the loss (`kl_teacher` of the regularisers). Invariant: a token's advantage depends on that token alone,
but for the share of the task's reward.
"""

from typing import Annotated

import jax
import numpy as np

from rlax_stack.objectives import ratios
from rlax_stack.objectives.boxes import Box, Range
from rlax_stack.objectives.inputs import LossInputs
from rlax_stack.objectives.reward_batch import RewardBatch, groups_of


def teacher(batch: RewardBatch, *, task_coef: Annotated[float, Range(0.0)] = 0.0) -> np.ndarray:
  """The log-ratio of teacher and sampler at every token, and a share of the task's advantage.

  Aᵢₜ = β (log π_teacher,ₜ − log π_behaviour,ₜ) + c (Rᵢ − μ_g)

  Divided by: nothing. Gradient flows through: nothing. Its mean over samples is −β times the reverse
  KL of each token, what comes after the token left out (discount 0).
  See "On-Policy Distillation", Lu and Thinking Machines Lab
  (https://thinkingmachines.ai/blog/on-policy-distillation/), where β = 1 and c = 0.

  Args:
    batch: ragged groups; of one sample too, whose task advantage is 0.
    coef: β.
    task_coef: c.

  Returns: float64 [B], the task's part; the teacher's is added where its log-probs are (`teacher_advantages`).
  """
  centred = np.zeros(batch.reward.size)
  for member in groups_of(batch):
    centred[member] = batch.reward[member] - batch.reward[member].mean()
  return task_coef * centred


def teacher_advantages(
  inputs: LossInputs, *, coef: Annotated[float, Range(0.0)] = 1.0
) -> jax.Array:
  """Advantages of `teacher`.

  Args:
    inputs: [M, rows, N].
    coef: β.
  """
  gain = ratios.log_ratio(inputs.teacher_log_probs_t, inputs.behaviour_log_probs_t, inputs.mask_t)
  return inputs.adv_t + coef * gain


TABLE = {
  'teacher': Box(
    teacher,
    formula='A = {coef:g}·log π_teacher/π_behaviour + {task_coef:g}·(R − μ_g)',
    tags=frozenset({'teacher', 'behaviour', 'unscored'}),
    token_advantages=teacher_advantages,
  )
}
