import types

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rlax_stack.errors import KernelError
from rlax_stack.pallas_kernels import dispatch, fused_log_prob_tpu, self_test, self_test_gpu


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


@pytest.mark.skipif(
  not hasattr(plgpu, 'InterpretGPUParams'), reason='the GPU interpreter came with jax 0.12'
)
def test_gpu_kernels_agree_with_their_xla_forms():
  names = self_test.compare(self_test_gpu.KERNELS, plgpu.InterpretGPUParams())
  assert names == ('tree attention', 'shared-prefix decode')


def test_on_a_hopper_gpu_what_pallas_chooses_is_compared(monkeypatch):
  hopper = types.SimpleNamespace(platform='gpu', compute_capability='9.0', device_kind='H100')
  monkeypatch.setattr(dispatch, 'target_device', lambda mesh: hopper)
  monkeypatch.setattr(dispatch, '_MOSAIC_GPU', (0, 10))
  wrong = {'a kernel': lambda interpret: self_test.Deviation(jnp.ones(3), jnp.zeros(3))}
  monkeypatch.setattr(self_test_gpu, 'KERNELS', wrong)
  assert self_test.check_kernels('auto') == ()
  with pytest.raises(KernelError, match='a kernel differs by 1 from its XLA form on H100'):
    self_test.check_kernels('pallas')
