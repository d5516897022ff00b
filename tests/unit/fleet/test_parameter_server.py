"""Published weights: whole, growing, unchanged."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.errors import FleetError
from rlax_stack.fleet.parameter_server import (
  ParameterServer,
  TensorSpec,
  check_manifest,
  manifest_of,
)


def _params(value, shape=(2, 3), dtype=jnp.float32):
  return {
    'layers': {'q_proj': {'kernel': jnp.full(shape, value, dtype)}},
    'norm': np.full(4, value, np.float32),
  }


def test_publish_then_latest():
  server = ParameterServer()
  assert server.latest() is None
  server.publish(0, _params(1))
  server.publish(3, _params(2))
  version, params = server.latest()
  assert version == 3
  np.testing.assert_array_equal(
    params['layers']['q_proj']['kernel'], np.full((2, 3), 2, np.float32)
  )


def test_snapshot_survives_donation_and_writes():
  server = ParameterServer()
  params = _params(1)
  server.publish(0, params)
  params['layers']['q_proj']['kernel'].delete()
  params['norm'][:] = 9
  _, held = server.latest()
  np.testing.assert_array_equal(held['layers']['q_proj']['kernel'], np.ones((2, 3), np.float32))
  np.testing.assert_array_equal(held['norm'], np.ones(4, np.float32))
  with pytest.raises(ValueError, match='read-only'):
    held['norm'][0] = 5


def test_without_copy_the_arrays_are_handed_over():
  server = ParameterServer()
  params = _params(1)
  server.publish(0, params, copy=False)
  assert (
    server.latest().params['layers']['q_proj']['kernel'] is params['layers']['q_proj']['kernel']
  )


def test_versions_only_grow_within_an_epoch():
  server = ParameterServer()
  server.publish(5, _params(1))
  server.publish(5, _params(1))  # the same again is a no-op
  with pytest.raises(FleetError, match='Version 5 was published with other content'):
    server.publish(5, _params(2))
  with pytest.raises(FleetError, match='Version 4 came after 5'):
    server.publish(4, _params(1))
  assert server.begin_epoch() == 1 and server.epoch == 1
  assert server.latest().version == 5  # readable until something replaces it
  server.publish(2, _params(3))
  assert server.latest().version == 2
  with pytest.raises(FleetError, match='Version 1 came after 2'):
    server.publish(1, _params(3))
  with pytest.raises(FleetError, match='at least 0'):
    ParameterServer().publish(-1, _params(1))


def test_changed_shape_is_refused_and_the_old_version_stays():
  server = ParameterServer()
  server.publish(0, _params(1))
  with pytest.raises(
    FleetError, match=r'layers/q_proj/kernel is float32\[3, 2\], but float32\[2, 3\] is expected'
  ):
    server.publish(1, _params(1, shape=(3, 2)))
  assert server.latest().version == 0


def test_manifest_names_paths_shapes_and_dtypes():
  manifest = manifest_of(_params(1, dtype=jnp.bfloat16))
  assert manifest == {
    'layers/q_proj/kernel': TensorSpec((2, 3), 'bfloat16'),
    'norm': TensorSpec((4,), 'float32'),
  }
  assert manifest_of(jax.eval_shape(lambda: _params(1, dtype=jnp.bfloat16))) == manifest


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'norm': TensorSpec((5,), 'float32')}, r'norm is float32\[5\], but float32\[4\]'),
    ({'norm': TensorSpec((4,), 'bfloat16')}, r'norm is bfloat16\[4\], but float32\[4\]'),
    ({'lm_head': TensorSpec((1,), 'float32')}, r"unknown \['lm_head'\]"),
  ],
)
def test_check_manifest(change, message):
  expected = manifest_of(_params(1))
  check_manifest(expected, dict(expected))
  with pytest.raises(FleetError, match=message):
    check_manifest(expected, expected | change)
  with pytest.raises(FleetError, match=r"absent \['norm'\]"):
    check_manifest(expected, {'layers/q_proj/kernel': expected['layers/q_proj/kernel']})


def test_wait_for():
  server = ParameterServer()
  with pytest.raises(FleetError, match='No weights of version 0 within 0 s; the newest are None'):
    server.wait_for(0, timeout_s=0)
  threading.Timer(0.05, server.publish, [1, _params(1)]).start()
  start_s = time.monotonic()
  assert server.wait_for(1, timeout_s=10).version == 1
  assert time.monotonic() - start_s < 2
  assert server.wait_for(0, timeout_s=0).version == 1
  threading.Timer(0.05, server.close, ['the learner died']).start()
  with pytest.raises(FleetError, match='the learner died'):
    server.wait_for(2, timeout_s=10)


def test_readers_never_see_a_mixture():
  server = ParameterServer()
  server.publish(0, _params(0))
  mixed, done = [], threading.Event()

  def read():
    last = -1
    while not done.is_set():
      version, params = server.latest()
      values = {float(params['norm'][0]), float(params['layers']['q_proj']['kernel'][0, 0])}
      if values != {float(version)} or version < last:
        mixed.append((version, values))
      last = version

  reader = threading.Thread(target=read)
  reader.start()
  for version in range(1, 40):
    server.publish(version, _params(version))
  done.set()
  reader.join(5)
  assert not mixed and server.latest().version == 39
