"""The counts behind the scaling benchmark: a tiny model on virtual devices, and the curve by hand."""

import dataclasses

import pytest

from benchmarks.scaling import count_step, over_ideal
from rlax_stack.models.shapes import SHAPES
from rlax_stack.planning.compiled_counts import CompiledCounts


def test_the_curve_by_hand():
  def counts(flops, sent):
    return CompiledCounts(calls={}, sent_bytes={'all-gather': sent}, product_flops=flops)

  found = over_ideal({4: counts(100.0, 75.0), 2: counts(100.0, 40.0), 8: counts(110.0, 70.0)})
  assert found[2] == {'flops': 1.0, 'bytes': 1.0}
  assert found[4] == pytest.approx({'flops': 1.0, 'bytes': 75 / 60})
  assert found[8] == pytest.approx({'flops': 1.1, 'bytes': 1.0})


def test_a_device_does_as_much_whatever_their_number():
  """Products alike, and bytes within 5% of (n - 1) / n, in the compiled step itself."""
  model = dataclasses.replace(
    SHAPES['smollm2_135m'], num_layers=2, vocab_size=512, hidden_size=64, intermediate_size=128
  )
  found = over_ideal({n: count_step(model, n, 128) for n in (2, 8)})
  assert found[8]['flops'] == pytest.approx(1.0, abs=0.01)
  assert found[8]['bytes'] == pytest.approx(1.0, abs=0.05)
