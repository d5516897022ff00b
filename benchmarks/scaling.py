"""How work and traffic of one device grow with the number of devices, from compiled programs: the learner's own step.

  python -m benchmarks.scaling                                        # Qwen3-32B on 8, 64 and 1,024 virtual devices
  python -m benchmarks.scaling --model=shape:qwen3_0p6b --devices=8,64

Weak scaling under FSDP: every device keeps one row, whatever their number, so the products of a device stay as they
are, and what it sends of the weights grows as (n - 1) / n. Nothing is run: the train step is compiled for virtual CPU
devices, and its products and collectives are counted from the text of the compiled program, loops as often as they run.
`flops` and `bytes` are over this ideal curve through the smallest number of devices; 1 is ideal. The last line is JSON.
"""

import json
import os

if __name__ == '__main__':  # before jax is imported
  os.environ['JAX_PLATFORMS'] = 'cpu'
  # What is compiled is read, not run.
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'

import jax
import jax.numpy as jnp
from absl import app, flags

from rlax_stack.learner.optimizer import OptimizerSettings
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings
from rlax_stack.learner.settings import LearnerSettings
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.shapes import known_shape
from rlax_stack.objectives.objective import resolve
from rlax_stack.planning.compiled_counts import CompiledCounts
from rlax_stack.planning.learner_programs import train_figures
from rlax_stack.sharding import make_mesh

_MODEL = flags.DEFINE_string('model', 'shape:qwen3_32b', 'shape of the model')
_DEVICES = flags.DEFINE_list('devices', ['8', '64', '1024'], 'numbers of devices, ascending')
_ROW = flags.DEFINE_integer('row_length', 2048, 'tokens of a row')


def count_step(model: ModelConfig, devices: int, row_length: int) -> CompiledCounts:
  """What one device does in a train step of two micro-batches with one row on each device."""
  settings = LearnerSettings(
    rows=RowPlan(
      shape=RowShape(row_length, row_length // 2),
      micro_batch_rows=devices,
      max_micro_batches=2,
    ),
    forward=ForwardSettings(compute_dtype=jnp.bfloat16, remat='layer'),
    objective=resolve(),
    optimizer=OptimizerSettings(learning_rate=1e-6),
  )
  mesh = make_mesh({'fsdp': devices}, jax.devices()[:devices])
  return train_figures(model, settings, mesh).counts


def over_ideal(counts: dict[int, CompiledCounts]) -> dict[int, dict[str, float]]:
  """Products and sent bytes of a device over the ideal curve through the smallest number of devices."""
  least = min(counts)
  flops, sent = counts[least].product_flops, sum(counts[least].sent_bytes.values())

  def share(devices: int) -> float:
    return (devices - 1) / devices

  return {
    devices: {
      'flops': found.product_flops / flops,
      'bytes': sum(found.sent_bytes.values()) / (sent * share(devices) / share(least)),
    }
    for devices, found in counts.items()
  }


def main(argv: list[str]) -> None:
  """Compiles for every number of devices and prints the ratios."""
  del argv
  wanted = [int(devices) for devices in _DEVICES.value]
  jax.config.update('jax_num_cpu_devices', max(wanted))
  model, counts = known_shape(_MODEL.value), {}
  for devices in wanted:
    counts[devices] = count_step(model, devices, _ROW.value)
    sent = {k: round(v / 2**30, 3) for k, v in counts[devices].sent_bytes.items() if v}
    print(f'{devices:5d} devices: {counts[devices].product_flops:.4g} FLOPs, GiB sent {sent}')
  found = over_ideal(counts)
  for devices, ratios in found.items():
    print(f'{devices:5d} devices: ' + ', '.join(f'{k} {v:.3f}' for k, v in ratios.items()))
  print(json.dumps({'benchmark': 'scaling', 'model': _MODEL.value, 'over_ideal': found}))


if __name__ == '__main__':
  app.run(main)
