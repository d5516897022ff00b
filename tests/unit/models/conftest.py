"""Tiny model files: a GGUF writer and models of a few thousand parameters."""

import struct

import numpy as np
import pytest

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.layout import leaves, set_leaf

_TYPES = {'F32': 0, 'F16': 1, 'Q4_0': 2, 'Q4_1': 3, 'Q8_0': 8, 'BF16': 30}


def _string(text):
  raw = text.encode('utf-8')
  return struct.pack('<Q', len(raw)) + raw


def _value(value):
  """Type number and bytes of one metadata value."""
  if isinstance(value, bool):
    return 7, struct.pack('<?', value)
  if isinstance(value, int):
    return 4, struct.pack('<I', value)
  if isinstance(value, float):
    return 6, struct.pack('<f', value)
  if isinstance(value, str):
    return 8, _string(value)
  if isinstance(value, np.ndarray):
    return 9, struct.pack('<IQ', 5, value.size) + value.astype('<i4').tobytes()
  return 9, struct.pack('<IQ', 8, len(value)) + b''.join(_string(item) for item in value)


def gguf_bytes(metadata, tensors, *, version=3, alignment=32):
  """A file of `metadata` and `tensors`: name -> (type name, shape slowest first, raw bytes)."""
  head = b'GGUF' + struct.pack('<IQQ', version, len(tensors), len(metadata))
  for key, value in metadata.items():
    code, raw = _value(value)
    head += _string(key) + struct.pack('<I', code) + raw
  data = b''
  for name, (kind, shape, raw) in tensors.items():
    code = _TYPES.get(kind, kind)
    axes = struct.pack(f'<I{len(shape)}Q', len(shape), *reversed(shape))
    head += _string(name) + axes + struct.pack('<IQ', code, len(data))
    data += raw + bytes(-len(raw) % alignment)
  return head + bytes(-len(head) % alignment) + data


_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]


def _byte_alphabet():
  """The 256 printable characters that stand for bytes in byte-level BPE, in byte order."""
  extra = iter(range(256, 512))
  return [chr(byte if byte in _BYTES else next(extra)) for byte in range(256)]


def gguf_metadata(config, family='llama', *, pre='smollm', **changes):
  """Metadata of a model of `config` with a byte vocabulary, two merges and three special tokens."""
  tokens = [*_byte_alphabet(), '12', 'Ġa', '<|im_start|>', '<|im_end|>', '<|pad|>']
  kinds = np.asarray([1] * 258 + [3] * 3)
  return {
    'general.architecture': family,
    f'{family}.block_count': config.num_layers,
    f'{family}.context_length': config.max_context,
    f'{family}.embedding_length': config.hidden_size,
    f'{family}.feed_forward_length': config.intermediate_size,
    f'{family}.attention.head_count': config.num_heads,
    f'{family}.attention.head_count_kv': config.num_kv_heads,
    f'{family}.attention.key_length': config.head_dim,
    f'{family}.attention.layer_norm_rms_epsilon': config.rms_norm_eps,
    f'{family}.rope.freq_base': config.rope_theta,
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': pre,
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.token_type': kinds,
    'tokenizer.ggml.merges': ['1 2', 'Ġ a'],
    'tokenizer.ggml.bos_token_id': 258,
    'tokenizer.ggml.eos_token_id': 259,
    'tokenizer.ggml.padding_token_id': 260,
    'tokenizer.chat_template': (
      "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}"
      "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    **changes,
  }


def random_tree(config, seed=0):
  """Random float32 parameters of `config` as numpy arrays."""
  rng = np.random.default_rng(seed)
  tree = {}
  for leaf in leaves(config):
    set_leaf(tree, leaf.path, rng.standard_normal(leaf.full_shape(config)).astype(np.float32))
  return tree


@pytest.fixture
def tiny_config():
  return ModelConfig(
    vocab_size=261,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=64,
  )


@pytest.fixture(name='gguf_bytes')
def _gguf_bytes_fixture():
  return gguf_bytes


@pytest.fixture(name='gguf_metadata')
def _gguf_metadata_fixture():
  return gguf_metadata


@pytest.fixture(name='random_tree')
def _random_tree_fixture():
  return random_tree
