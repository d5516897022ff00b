"""The metadata of a GGUF file to a ModelConfig."""

import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models.gguf_config import config_from_gguf

METADATA = {
  'general.architecture': 'llama',
  'llama.block_count': 3,
  'llama.context_length': 512,
  'llama.embedding_length': 16,
  'llama.feed_forward_length': 24,
  'llama.attention.head_count': 4,
  'llama.attention.head_count_kv': 2,
  'llama.attention.layer_norm_rms_epsilon': 1e-6,
  'llama.rope.freq_base': 5000.0,
}


def _config(metadata, **changes):
  arguments = {'source': 'm.gguf', 'vocab_size': 32, 'tied': True, 'frequency_factors': None}
  return config_from_gguf(metadata, **(arguments | changes))


def test_fields():
  config = _config(METADATA)
  assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32, 16, 24)
  assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
  assert (config.head_dim, config.max_context, config.rope_theta) == (4, 512, 5000.0)
  assert config.rms_norm_eps == 1e-6 and config.rope_scaling is None
  assert config.tie_embeddings and not _config(METADATA, tied=False).tie_embeddings


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'general.architecture': 'mamba'}, "architecture 'mamba' is not supported"),
    ({'llama.expert_count': 8}, 'expert_count is not supported'),
    ({'llama.block_count': 'three'}, 'block_count is three, expected one number'),
    ({'llama.attention.head_count': None}, 'head_count is None, expected one number'),
  ],
)
def test_refused(change, message):
  with pytest.raises(ModelFileError, match=message):
    _config(METADATA | change)
