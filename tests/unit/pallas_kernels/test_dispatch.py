import jax
import pytest

from rlax_stack import sharding
from rlax_stack.pallas_kernels.dispatch import (
  IMPLEMENTATIONS,
  WITHOUT_REFERENCE,
  choose,
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
