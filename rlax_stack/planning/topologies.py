"""Machines by name: described TPU slices and GPU nodes, and what their makers say of one device.

TPU slices are described by libtpu, which compiles for them without one. GPU nodes are virtual CPU devices: their
programs are XLA's for the CPU, so memory and collectives of a plan for them are those of another compiler, and
marked so.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from rlax_stack.errors import ConfigError

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
  """One device as jax counts them, by its maker's figures.

  hbm_bytes: memory. matmul_flops: of bfloat16 products, per second. hbm_bytes_s: of memory. link_bytes_s: one way
  out of one device, over one pair of links of a ring. per_chip: devices of a chip.
  """

  hbm_bytes: float
  matmul_flops: float
  hbm_bytes_s: float
  link_bytes_s: float
  per_chip: int = 1


KINDS = {
  'v5e': DeviceKind(hbm_bytes=16 * _GIB, matmul_flops=197e12, hbm_bytes_s=819e9, link_bytes_s=90e9),
  'v5p': DeviceKind(
    hbm_bytes=95 * _GIB, matmul_flops=459e12, hbm_bytes_s=2765e9, link_bytes_s=180e9
  ),
  'v6e': DeviceKind(
    hbm_bytes=32 * _GIB, matmul_flops=918e12, hbm_bytes_s=1640e9, link_bytes_s=180e9
  ),
  'tpu7x': DeviceKind(
    hbm_bytes=96 * _GIB, matmul_flops=1153e12, hbm_bytes_s=3690e9, link_bytes_s=180e9, per_chip=2
  ),
  'h100': DeviceKind(hbm_bytes=80e9, matmul_flops=989e12, hbm_bytes_s=3350e9, link_bytes_s=450e9),
}
_GPUS = ('h100',)

# Of bfloat16 products per second of one device as jax counts them, by how its name begins.
_PEAKS = {
  'TPU v4': 275e12,
  'TPU v5 lite': KINDS['v5e'].matmul_flops,
  'TPU v5e': KINDS['v5e'].matmul_flops,
  'TPU v5': KINDS['v5p'].matmul_flops,
  'TPU v6': KINDS['v6e'].matmul_flops,
  'TPU7x': KINDS['tpu7x'].matmul_flops,
  'NVIDIA A100': 312e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H100': KINDS['h100'].matmul_flops,
  'NVIDIA H200': KINDS['h100'].matmul_flops,
  'NVIDIA B200': 2250e12,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
  """A named machine: `v5p:8x8x16`, `v5e:8x8`, `h100:8`.

  kind: of its devices. devices: to compile for. compiled_for: what the compiler took them for.
  """

  name: str
  kind: DeviceKind
  devices: tuple[Any, ...]
  compiled_for: str

  def less(self, taken: float) -> 'Topology':
    """The same with so many bytes less on every device."""
    kind = dataclasses.replace(self.kind, hbm_bytes=self.kind.hbm_bytes - taken)
    return dataclasses.replace(self, kind=kind)


class Beside(NamedTuple):
  """What other policies hold of a device, in bytes: of the learner's, and of a worker's."""

  learner: float = 0.0
  worker: float = 0.0


NOTHING_BESIDE = Beside()


def peak_flops(device_kind: str) -> float | None:
  """The maker's bfloat16 FLOPs per second of a device by jax's name for it; None for others, the CPU among them."""
  found = [name for name in _PEAKS if device_kind.startswith(name)]
  return _PEAKS[max(found, key=len)] if found else None


def virtual_devices(name: str) -> int:
  """CPU devices that a plan for this topology needs; 1 where libtpu describes it."""
  family, sizes = _parts(name)
  return sizes[0] if family in _GPUS else 1


def describe(name: str) -> Topology:
  """The topology of a name.

  Raises:
    ConfigError: a name that is none, or a TPU slice where libtpu is not installed or knows no such slice.
  """
  family, sizes = _parts(name)
  if family in _GPUS:
    devices = jax.devices('cpu')
    if len(devices) < sizes[0]:
      raise ConfigError(
        f'{name} needs {sizes[0]} virtual CPU devices, but there are {len(devices)}.'
      )
    return Topology(
      name=name, kind=KINDS[family], devices=tuple(devices[: sizes[0]]), compiled_for='virtual CPU'
    )
  try:
    described = topologies.get_topology_desc(platform='tpu', topology_name=name)
  except Exception as error:  # libtpu raises whatever it likes
    reason = str(error).splitlines()[0]
    raise ConfigError(
      f'topology {name} cannot be described: {reason}. Install libtpu (pip install rlax-stack[aot]) and name a slice '
      'that exists, such as v5e:8x8, v5p:4x4x4 or v6e:4x4.'
    ) from error
  return Topology(
    name=name, kind=KINDS[family], devices=tuple(described.devices), compiled_for=f'TPU {family}'
  )


def _parts(name: str) -> tuple[str, tuple[int, ...]]:
  found = re.fullmatch(r'(\w+):(\d+(?:x\d+)*)', name)
  if found is None or found[1] not in KINDS:
    raise ConfigError(
      f'topology {name!r} is none. Write KIND:SIZES, for example v5p:4x4x4 or h100:8; kinds are {", ".join(KINDS)}.'
    )
  return found[1], tuple(int(size) for size in found[2].split('x'))
