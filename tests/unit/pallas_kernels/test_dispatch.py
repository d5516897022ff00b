import types

import jax
import jax.numpy as jnp
import pytest

from rlax_stack import sharding
from rlax_stack.pallas_kernels.dispatch import (
  IMPLEMENTATIONS,
  WITHOUT_REFERENCE,
  choose,
  is_gpu,
  no_gpu_form,
  no_pallas,
  target_device,
)


def test_auto_takes_what_there_is():
  assert choose('k', 'auto', absent=None) == 'pallas'
  assert choose('k', 'auto', absent='no such device') == 'xla'
  for implementation in IMPLEMENTATIONS[1:]:
    assert choose('k', implementation, absent=None) == implementation


def test_what_is_absent_or_unknown_is_refused_with_the_reason():
  with pytest.raises(ValueError, match="'pallas' of decode is absent: no such device"):
    choose('decode', 'pallas', absent='no such device')
  with pytest.raises(ValueError, match="'flash'. Choose from auto, pallas, xla, reference"):
    choose('decode', 'flash', absent=None)


def test_the_device_is_that_of_the_mesh():
  mesh = sharding.make_mesh({'data': 2}, jax.devices()[1:3])
  assert target_device(mesh) == jax.devices()[1]
  assert target_device(None) == jax.devices()[0]


def test_a_form_that_a_kernel_has_not_is_refused():
  with pytest.raises(ValueError, match="'reference'. Choose from auto, pallas, xla[.]"):
    choose('decode', 'reference', absent=None, forms=WITHOUT_REFERENCE)


def test_devices_without_pallas_forms_say_why():
  assert no_pallas(jax.devices()[0]) == 'it is for TPU, and this is cpu'
  assert (
    no_pallas(jax.devices()[0], on_gpu=True) == 'it is for TPU and Hopper GPUs, and this is cpu'
  )
  gpu = types.SimpleNamespace(platform='gpu', compute_capability='9.0')
  assert no_pallas(gpu) == 'it is for TPU, and this is gpu'
  old = jax.__version_info__ < (0, 12)
  assert is_gpu(gpu) and not is_gpu(jax.devices()[0])
  assert (no_pallas(gpu, on_gpu=True) is None) != old
  for capability in ('8.0', '10.0', 'gfx90a'):
    gpu.compute_capability = capability
    expected = 'needs jax 0.12' if old else f'has compute capability {capability}'
    assert expected in no_pallas(gpu, on_gpu=True)


def test_auto_leaves_alone_what_was_never_measured():
  assert choose('k', 'auto', absent=None, measured=False) == 'xla'
  assert choose('k', 'pallas', absent=None, measured=False) == 'pallas'


def test_arrays_that_gpu_forms_do_not_fit_say_why():
  assert no_gpu_form(jnp.bfloat16, 64) is None
  assert 'bfloat16, and this is float32' in no_gpu_form(jnp.float32, 64)
  assert 'width 64 and 128, and this is 80' in no_gpu_form(jnp.bfloat16, 80)
