import jax
import pytest

from rlax_stack import sharding
from rlax_stack.pallas_kernels.dispatch import IMPLEMENTATIONS, choose, target_device


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
