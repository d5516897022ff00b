"""`python -m rlax_stack.plan --config=…`: whether a config fits a machine, and what it would cost.

    python -m rlax_stack.plan --config=configs/clusters/qwen3_0p6b_v5e_8.py
    python -m rlax_stack.plan --config=configs/quickstart.py --topology=v5e:2x2 --config.learner.mesh.fsdp=4

No accelerator is needed: libtpu (pip install 'rlax-stack[aot]') compiles the learner's own train step for a TPU
slice that is only described. A GPU node (h100:8) is planned on virtual CPU devices, which is another compiler, and
says so. --topology goes before config.plan.topology. The last line is JSON.
"""

import contextlib
import os
from collections.abc import Sequence

if __name__ == '__main__':  # before jax is imported
  os.environ['JAX_PLATFORMS'] = 'cpu'
  # No machine is asked what it is, and another process may have loaded libtpu too.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

import jax
from absl import flags

from rlax_stack import command_line
from rlax_stack.errors import ConfigError
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.load import describe_model
from rlax_stack.models.shapes import SCHEME, known_shape
from rlax_stack.plan_of_policies import plan_policies
from rlax_stack.planning.report import Report
from rlax_stack.planning.topologies import describe, virtual_devices


def _flags(values: flags.FlagValues) -> None:
  flags.DEFINE_string('topology', '', 'Machine, for example v5p:4x4x4.', flag_values=values)
  flags.DEFINE_string('out', '', 'File for the report.', flag_values=values)


def shape_of(path: str) -> ModelConfig:
  """A model's shape: of a known name, or read from its files."""
  return known_shape(path) if path.startswith(SCHEME) else describe_model(path)[0]


def plan(argv: Sequence[str]) -> Report:
  """The plan of a command line.

  Raises:
    ConfigError: what cannot be planned: no topology, a mesh that it does not have.
    ModelFileError: no such model.
  """
  config, values = command_line.parse(argv, _flags)
  name = values['topology'].value or config.plan.topology
  if not name:
    raise ConfigError('no topology was given. Add for example --topology=v5e:8x8.')
  if virtual_devices(name) > 1:
    with contextlib.suppress(RuntimeError):  # jax has its devices already: `describe` counts them
      jax.config.update('jax_num_cpu_devices', virtual_devices(name))
  report = plan_policies(config, shape_of, describe(name))
  if values['out'].value:
    report.save(values['out'].value)
  return report


def main(argv: Sequence[str]) -> int:
  """Prints the plan; the exit status is 1 where it does not fit."""
  report = plan(argv)
  print(report.text())
  return 0 if report.summary['fits'] else 1


if __name__ == '__main__':
  command_line.run(main)
