"""Compiles for described TPU topologies on a machine without one; needs libtpu (make aot)."""

import contextlib
import os
import re

# Before libtpu is loaded: no machine is asked what it is, and two test processes may load it at once.
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from rlax_stack import sharding  # noqa: E402

GENERATIONS = {'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2', 'tpu7x': 'tpu7x:2x2x1'}


@pytest.fixture(scope='session')
def make_tpu_mesh():
  """Function (generation, mesh sizes) -> a mesh over as many of its described devices."""

  def make(generation, **sizes):
    topology = topologies.get_topology_desc(platform='tpu', topology_name=GENERATIONS[generation])
    shape = sharding.MeshShape(**sizes)
    count = 1
    for size in shape.sizes:
      count *= size
    return sharding.make_mesh(shape, list(topology.devices)[:count])

  return make


@pytest.fixture(scope='session')
def less_effort():
  """Context in which XLA compiles with less effort, which halves the time.

  Kernels and their memory are the same; what XLA makes of the rest takes a little more or less of it.
  """

  @contextlib.contextmanager
  def context():
    before = jax.config.jax_optimization_level
    jax.config.update('jax_optimization_level', 'O1')
    try:
      yield
    finally:
      jax.config.update('jax_optimization_level', before)

  return context


@pytest.fixture(scope='session')
def compile_for(less_effort):
  """Function (mesh, function, {name: (shape, dtype, spec)}) -> the compiled program; `quick` is `less_effort`."""

  def compile_(mesh, function, *, quick=False, **arguments):
    shapes = [
      jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
      for shape, dtype, spec in arguments.values()
    ]
    # Mosaic asks for the device it lowers to; none is attached, so the mesh must say it.
    effort = less_effort if quick else contextlib.nullcontext
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), effort():
      return jax.jit(function).lower(*shapes).compile()

  return compile_


@pytest.fixture(scope='session')
def vmem_of():
  """Function (compiled program) -> the VMEM of each of its Pallas kernels, in bytes, as the compiler laid it out."""

  def read(compiled):
    used = re.compile(
      r'op_name="[^"]*?(\w+)\)*/pallas_call".*"used_scoped_memory_configs":\[([^\]]*)\]'
    )
    lines = [line for line in compiled.as_text().splitlines() if 'tpu_custom_call' in line]
    found = [used.search(line) for line in lines]
    assert found
    assert all(found), 'a kernel does not say what VMEM it takes'
    return {
      match[1]: sum(int(size) for size in re.findall(r'"size":"(\d+)"', match[2]))
      for match in found
    }

  return read
