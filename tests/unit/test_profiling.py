"""Traces of chosen steps, and utilisation by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from configs import base
from rlax_stack.config import from_config_dict
from rlax_stack.models.shapes import known_shape
from rlax_stack.planning.topologies import peak_flops
from rlax_stack.profiling import StepTraces, make_utilisation


def test_consecutive_steps_share_a_trace_and_others_leave_none(tmp_path):
  traces = StepTraces(tmp_path / 'profile', (2, 3, 5))
  for step in range(1, 6):
    with traces.around(step):
      jax.block_until_ready(jnp.ones(3) * step)
    assert traces._tracing == (step == 2)
  traces.close()
  folders = sorted((tmp_path / 'profile').iterdir())
  assert [folder.name for folder in folders] == ['step_2', 'step_5']
  for folder in folders:
    assert len(list(folder.rglob('*.xplane.pb'))) == 1


def test_an_error_in_the_last_step_still_writes_its_trace(tmp_path):
  traces = StepTraces(tmp_path, (1,))
  with pytest.raises(RuntimeError, match='lost'), traces.around(1):
    raise RuntimeError('lost')
  assert list(tmp_path.rglob('*.xplane.pb'))


@pytest.mark.parametrize(
  ('kind', 'tera'),
  [
    ('TPU v5 lite', 197),
    ('TPU v5p', 459),
    ('TPU v5', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H200', 989),
  ],
)
def test_peaks_are_found_by_the_name_of_the_device(kind, tera):
  assert peak_flops(kind) == tera * 1e12
  assert peak_flops('cpu') is None


def test_utilisation_is_needed_work_over_what_the_devices_could_do():
  config, model = from_config_dict(base.get_config()), known_shape('shape:smollm2_135m')
  mesh = dataclasses.replace(config.learner.mesh, fsdp=4)
  learner = dataclasses.replace(config.learner, mesh=mesh, updates_per_batch=2)
  config = dataclasses.replace(config, learner=learner)
  packed = {'row_tokens': 1000.0, 'targets': 600.0, 'pairs_per_layer': 50000.0}
  # 30 layers of width 576, MLP 1536, 9 + 3 heads of 64; vocabulary 49152.
  matrices = 576 * 64 * (2 * 9 + 2 * 3) + 3 * 576 * 1536
  needed = 6 * (30 * matrices * 1000 + 49152 * 576 * 600) + 12 * 30 * 9 * 64 * 50000
  rate = 2 * needed / 4 / 0.5
  found = make_utilisation(config, model, 'TPU v5p')(packed, 0.5)
  assert found == pytest.approx({'perf/model_flops_per_s': rate, 'perf/mfu': rate / 459e12})
  assert make_utilisation(config, model, 'cpu')(packed, 0.5) == {
    'perf/model_flops_per_s': pytest.approx(rate)
  }
  profile = dataclasses.replace(config.profile, peak_tflops=0.2)
  told = make_utilisation(dataclasses.replace(config, profile=profile), model, 'cpu')
  assert told(packed, 0.5)['perf/mfu'] == pytest.approx(rate / 0.2e12)
