"""The tensor types of GGUF that the project reads: bytes to float32, whole arrays at once.

A quantised type stores blocks of 32 numbers: a float16 scale d (and for Q4_1 a float16 minimum m),
then the integers. Nibbles: byte i of a block holds number i in its low half and number i + 16 in
its high half.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

_Q8_0 = np.dtype([('d', '<f2'), ('q', 'i1', 32)])
_Q4_0 = np.dtype([('d', '<f2'), ('q', 'u1', 16)])
_Q4_1 = np.dtype([('d', '<f2'), ('m', '<f2'), ('q', 'u1', 16)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockKind:
  """One tensor type. `decode` takes uint8 [blocks * block_bytes] to float32 [blocks * block_items]."""

  name: str
  block_items: int
  block_bytes: int
  decode: Callable[[np.ndarray], np.ndarray]

  def size_bytes(self, items: int) -> int:
    """Bytes of `items` numbers, a whole number of blocks."""
    return items // self.block_items * self.block_bytes


def _nibbles(packed: np.ndarray) -> np.ndarray:
  """uint8 [blocks, 16] to float32 [blocks, 32], values 0 to 15."""
  return np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)


def _decode_q8_0(raw: np.ndarray) -> np.ndarray:
  blocks = raw.view(_Q8_0)
  return (blocks['q'].astype(np.float32) * blocks['d'].astype(np.float32)[:, None]).reshape(-1)


def _decode_q4_0(raw: np.ndarray) -> np.ndarray:
  blocks = raw.view(_Q4_0)
  values = _nibbles(blocks['q']) - np.float32(8)
  return (values * blocks['d'].astype(np.float32)[:, None]).reshape(-1)


def _decode_q4_1(raw: np.ndarray) -> np.ndarray:
  blocks = raw.view(_Q4_1)
  values = _nibbles(blocks['q']) * blocks['d'].astype(np.float32)[:, None]
  return (values + blocks['m'].astype(np.float32)[:, None]).reshape(-1)


def _plain(name: str, dtype: np.dtype) -> BlockKind:
  return BlockKind(
    name=name,
    block_items=1,
    block_bytes=dtype.itemsize,
    decode=lambda raw: raw.view(dtype).astype(np.float32),
  )


# By the number that the format gives each type.
BLOCK_KINDS = {
  0: _plain('F32', np.dtype('<f4')),
  1: _plain('F16', np.dtype('<f2')),
  2: BlockKind(name='Q4_0', block_items=32, block_bytes=_Q4_0.itemsize, decode=_decode_q4_0),
  3: BlockKind(name='Q4_1', block_items=32, block_bytes=_Q4_1.itemsize, decode=_decode_q4_1),
  8: BlockKind(name='Q8_0', block_items=32, block_bytes=_Q8_0.itemsize, decode=_decode_q8_0),
  30: _plain('BF16', np.dtype(ml_dtypes.bfloat16)),
}
