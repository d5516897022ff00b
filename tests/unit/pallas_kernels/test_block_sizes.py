import pytest

from rlax_stack.errors import ConfigError
from rlax_stack.pallas_kernels import block_sizes
from rlax_stack.pallas_kernels.block_sizes import tree_blocks, tree_vmem


@pytest.mark.parametrize('device_kind', [*block_sizes.VMEM_BYTES])
@pytest.mark.parametrize('group', [1, 4, 7, 8])
@pytest.mark.parametrize(('head_dim', 'itemsize'), [(64, 2), (128, 2), (128, 4), (256, 2)])
def test_blocks_fit_half_of_the_memory(device_kind, group, head_dim, itemsize):
  blocks = tree_blocks(device_kind, group=group, head_dim=head_dim, itemsize=itemsize, tokens=8192)
  half = block_sizes.vmem_bytes(device_kind) // 2
  assert tree_vmem(blocks.q, blocks.kv, group, head_dim, itemsize) <= half
  assert blocks.q % 128 == blocks.kv % 128 == 0
  assert half < blocks.vmem_limit < 2 * half
  # Larger memories get the blocks that keep the matrix unit busy.
  if half >= 32 << 20:
    assert blocks.kv == 512
    assert group * blocks.q >= 512


def test_short_rows_get_short_blocks():
  sizes = {'group': 2, 'head_dim': 128, 'itemsize': 2}
  assert tree_blocks('TPU v5e', tokens=100, **sizes)[:2] == (128, 128)
  assert tree_blocks('TPU v5e', tokens=129, **sizes)[:2] == (256, 256)


def test_what_is_not_known_or_does_not_fit_is_refused():
  with pytest.raises(ConfigError, match="device kind 'TPU v9'. Known: TPU v4"):
    tree_blocks('TPU v9', group=1, head_dim=128, itemsize=2, tokens=512)
  with pytest.raises(ConfigError, match="200 query heads .* half of TPU v4 has 8. .*'xla'"):
    tree_blocks('TPU v4', group=200, head_dim=128, itemsize=4, tokens=512)
