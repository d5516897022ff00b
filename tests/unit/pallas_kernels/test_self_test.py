import jax.numpy as jnp
import pytest

from rlax_stack.errors import KernelError
from rlax_stack.pallas_kernels import fused_log_prob_tpu, self_test


def test_kernels_agree_with_their_xla_forms():
  names = self_test.check_kernels(interpret=True)
  assert names == ('tree attention', 'shared-prefix decode', 'fused log-prob')


def test_nothing_is_run_where_there_are_no_kernels():
  assert self_test.check_kernels() == ()


@pytest.mark.parametrize('wrong', [1.05, float('nan')])
def test_a_wrong_kernel_is_named_with_the_cure(wrong, monkeypatch):
  right = fused_log_prob_tpu.softmax_state

  def softmax_state(*args, **kwargs):
    top, total, spread, chosen = right(*args, **kwargs)
    return top, jnp.float32(wrong) * total, spread, chosen

  monkeypatch.setattr(fused_log_prob_tpu, 'softmax_state', softmax_state)
  with pytest.raises(KernelError, match='fused log-prob differs by .* config.model.kernels=xla'):
    self_test.check_kernels(interpret=True)
