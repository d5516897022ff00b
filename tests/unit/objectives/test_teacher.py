"""What a teacher's log-probs make of advantages, against numpy; `kl_teacher` is in test_regularisers.py."""

import jax.numpy as jnp
import numpy as np

from rlax_stack.objectives.advantages.teacher import teacher, teacher_advantages


def _with_teacher(make_inputs):
  rng = np.random.default_rng(3)
  inputs = make_inputs()
  scores = -rng.exponential(2.0, inputs.mask_t.shape).astype(np.float32)
  return inputs._replace(teacher_log_probs_t=jnp.asarray(scores))


def test_advantages_are_log_ratios_to_the_sampler(make_inputs):
  inputs = _with_teacher(make_inputs)
  got = teacher_advantages(inputs, coef=0.5)
  gap = np.asarray(inputs.teacher_log_probs_t) - np.asarray(inputs.behaviour_log_probs_t)
  want = np.asarray(inputs.adv_t) + 0.5 * gap
  mask = np.asarray(inputs.mask_t)
  np.testing.assert_allclose(np.asarray(got)[mask], want[mask], rtol=1e-6)


def test_the_task_counts_as_much_as_is_said(make_reward_batch):
  batch = make_reward_batch([1.0, 0.0, 0.5, 3.0], [0, 0, 0, 1], [2, 1, 2, 1])
  np.testing.assert_allclose(teacher(batch, task_coef=2.0), [1.0, -1.0, 0.0, 0.0])
  assert not teacher(batch).any()
