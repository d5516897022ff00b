"""Block sizes of the Pallas kernels, by the memory of the device: a table and arithmetic, nothing is measured.

Not for the XLA forms, whose blocks are tuned for caches. Invariant: what is chosen fits in half of the VMEM of one
core, by an estimate that counts every buffer twice where the pipeline does.
"""

from typing import NamedTuple

from rlax_stack.errors import ConfigError
from rlax_stack.pallas_kernels.tpu_blocks import LANES

_MIB = 1 << 20

# VMEM of one core in bytes, by what jax calls the device.
VMEM_BYTES = {
  'TPU v4': 16 * _MIB,
  'TPU v5 lite': 128 * _MIB,
  'TPU v5e': 128 * _MIB,
  'TPU v5': 64 * _MIB,
  'TPU v5p': 64 * _MIB,
  'TPU v6 lite': 128 * _MIB,
  'TPU v6e': 128 * _MIB,
  'TPU7x': 64 * _MIB,
}

_QUERY_ROWS = (
  1024  # rows of a query block, query heads times tokens, that keep the matrix unit busy
)
_MAX_BLOCK = 512


class TreeBlocks(NamedTuple):
  """Blocks of tree attention in tokens, and the VMEM that its kernels may take, in bytes."""

  q: int
  kv: int
  vmem_limit: int


def vmem_bytes(device_kind: str) -> int:
  """VMEM of one core.

  Raises:
    ConfigError: a device that the table does not know.
  """
  if device_kind not in VMEM_BYTES:
    raise ConfigError(
      f'no VMEM size is known for device kind {device_kind!r}. Known: {", ".join(VMEM_BYTES)}. Add it to '
      "VMEM_BYTES in rlax_stack/pallas_kernels/block_sizes.py, or take implementation 'xla'."
    )
  return VMEM_BYTES[device_kind]


def tree_blocks(
  device_kind: str, *, group: int, head_dim: int, itemsize: int, tokens: int
) -> TreeBlocks:
  """Blocks of tree attention for one device.

  Args:
    device_kind: as `jax.Device.device_kind`.
    group: query heads per key head.
    head_dim: width of a head.
    itemsize: bytes of an element of q, k and v.
    tokens: of a row; blocks are not much longer than it.

  Raises:
    ConfigError: an unknown device, or heads of which not even the smallest blocks fit.
  """
  vmem = vmem_bytes(device_kind)
  longest = max(LANES, min(_MAX_BLOCK, 1 << (tokens - 1).bit_length()))
  q = kv = longest
  while q > LANES and group * q > _QUERY_ROWS:
    q //= 2
  while kv > LANES and tree_vmem(q, kv, group, head_dim, itemsize) > vmem // 2:
    kv //= 2
  while q > LANES and tree_vmem(q, kv, group, head_dim, itemsize) > vmem // 2:
    q //= 2
  needed = tree_vmem(q, kv, group, head_dim, itemsize)
  if needed > vmem // 2:
    raise ConfigError(
      f'tree attention with {group} query heads per key head of width {head_dim} needs {needed >> 20} MiB of '
      f"VMEM at the smallest blocks; half of {device_kind} has {vmem >> 21}. Take implementation 'xla'."
    )
  return TreeBlocks(q, kv, vmem * 3 // 4)


def tree_vmem(q: int, kv: int, group: int, head_dim: int, itemsize: int) -> int:
  """Bytes that the hungriest of the kernels, dk with dv, holds at once."""
  rows, width = group * q, max(head_dim, LANES)
  blocks = 2 * itemsize * width * (2 * rows + 4 * kv)  # q, do; k, v, dk, dv: two of each
  sums = 4 * width * 2 * kv
  tiles = 4 * 5 * rows * kv  # scores, weights, their gradients, the mask
  return blocks + sums + tiles
