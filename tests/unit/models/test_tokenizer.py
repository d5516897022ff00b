import json

import numpy as np
import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models.gguf_tokenizer import tokenizer_from_gguf
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.types import Message

_MESSAGES = [Message(role='user', content='a 12')]


@pytest.fixture
def make(gguf_metadata, tiny_config):
  def run(pre='smollm', **changes):
    return tokenizer_from_gguf(gguf_metadata(tiny_config, pre=pre, **changes), source='x.gguf')

  return run


def _pieces(tokenizer, text):
  return [tokenizer.id_to_piece(token) for token in tokenizer.encode(text)]


def test_text_survives(make):
  for pre in ('smollm', 'gpt-2', 'default', 'llama-bpe', 'qwen2'):
    tokenizer = make(pre)
    for text in ('naïve 你好 🙂', " a 12  don't\n\n\tx", ''):
      tokens = tokenizer.encode(text)
      assert tokens.dtype == np.int32
      assert tokenizer.decode(tokens) == text


@pytest.mark.parametrize(
  ('pre', 'expected'),
  [
    # '1 2' is a merge, so a pair of digits shows whether digits were cut before merging.
    ('smollm', ['1', '2', '1', '2', 'Ġ', '1', '2']),
    ('qwen2', ['1', '2', '1', '2', 'Ġ', '1', '2']),
    ('gpt-2', ['12', '12', 'Ġ', '12']),
    ('llama-bpe', ['12', '1', '2', 'Ġ', '12']),  # runs of three: 121, 2
  ],
)
def test_digits_are_cut_as_the_file_names_it(make, pre, expected):
  assert _pieces(make(pre), '1212 12') == expected


def test_the_space_goes_with_the_word(make):
  assert _pieces(make('smollm'), 'a a') == ['a', 'Ġa']
  assert _pieces(make('llama-bpe'), '\n a') == ['Ċ', 'Ġa']


def test_qwen_normalises(make):
  assert make('qwen2').encode('e\u0301').tolist() == make('qwen2').encode('é').tolist()
  assert make('smollm').encode('e\u0301').size == 3


def test_special_tokens(make):
  tokenizer = make()
  tokens = tokenizer.encode('<|im_start|>a<|im_end|>')
  assert (tokens[0], tokens[-1], tokens.size) == (258, 259, 3)
  assert tokenizer.decode(tokens) == 'a'
  assert tokenizer.decode(tokens, skip_special_tokens=False) == '<|im_start|>a<|im_end|>'
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (258, 259, 260)
  assert tokenizer.vocab_size == 261
  assert tokenizer.piece_to_id('12') == 256
  assert tokenizer.piece_to_id('nothing') is None
  assert tokenizer.id_to_piece(5000) is None


def test_stop_tokens_hold_end_of_sequence_and_end_of_turn(make):
  tokenizer = make(**{'tokenizer.ggml.eos_token_id': 260, 'tokenizer.ggml.eot_token_id': 258})
  assert tokenizer.eos_id == 260
  assert tokenizer.stop_token_ids == (258, 259, 260)  # <|im_end|> is known by name


def test_chat_by_template_and_without(make):
  tokenizer = make()
  text = tokenizer.decode(tokenizer.encode_chat(_MESSAGES), skip_special_tokens=False)
  assert text == '<|im_start|>user\na 12<|im_end|>\n<|im_start|>assistant\n'
  closed = tokenizer.encode_chat(_MESSAGES, add_generation_prompt=False)
  assert tokenizer.encode_chat(_MESSAGES)[: closed.size].tolist() == closed.tolist()
  plain = make(**{'tokenizer.chat_template': 0})
  assert plain.chat_template is None
  assert plain.render_chat(_MESSAGES) == 'User: a 12\nAssistant:'
  begun = make(**{'tokenizer.chat_template': 0, 'tokenizer.ggml.add_bos_token': True})
  assert begun.encode_chat(_MESSAGES)[0] == begun.bos_id


def test_saved_directory_is_the_same_tokenizer(make, tmp_path):
  tokenizer = make(**{'tokenizer.ggml.eot_token_id': 258})
  tokenizer.save(tmp_path)
  again = Tokenizer.from_hf_dir(tmp_path)
  for name in ('eos_id', 'bos_id', 'pad_id', 'stop_token_ids', 'vocab_size', 'chat_template'):
    assert getattr(again, name) == getattr(tokenizer, name)
  assert again.encode_chat(_MESSAGES).tolist() == tokenizer.encode_chat(_MESSAGES).tolist()


def _edit(path, **change):
  fields = json.loads(path.read_text()) | change
  path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def test_places_of_the_template_and_of_the_end_token(make, tmp_path):
  make().save(tmp_path)
  config, generation = tmp_path / 'tokenizer_config.json', tmp_path / 'generation_config.json'
  named = [{'name': 'tool', 'template': 'x'}, {'name': 'default', 'template': 'y'}]
  _edit(config, chat_template=named, eos_token={'content': '<|pad|>'})
  tokenizer = Tokenizer.from_hf_dir(tmp_path)
  assert (tokenizer.chat_template, tokenizer.eos_id) == ('y', 260)
  assert tokenizer.stop_token_ids == (259, 260)
  (tmp_path / 'chat_template.jinja').write_text('z')
  _edit(config, eos_token=None)
  _edit(generation, eos_token_id=260)
  tokenizer = Tokenizer.from_hf_dir(tmp_path)
  assert (tokenizer.chat_template, tokenizer.eos_id) == ('z', 260)
  generation.unlink()
  with pytest.raises(ModelFileError, match='no end-of-sequence token'):
    Tokenizer.from_hf_dir(tmp_path)
  (tmp_path / 'config.json').write_text('{"eos_token_id": [258, 259]}')
  assert Tokenizer.from_hf_dir(tmp_path).eos_id == 258
  (tmp_path / 'config.json').write_text('{"eos_token_id": 7000}')
  with pytest.raises(ModelFileError, match='7000 is not in the vocabulary'):
    Tokenizer.from_hf_dir(tmp_path)


def test_bad_files_are_refused(make, tmp_path):
  with pytest.raises(ModelFileError, match='missing'):
    Tokenizer.from_hf_dir(tmp_path)
  make().save(tmp_path)
  whole = (tmp_path / 'tokenizer.json').read_bytes()
  for raw in (b'', b'{}', whole[: len(whole) // 2], b'\xff' * 20):
    (tmp_path / 'tokenizer.json').write_bytes(raw)
    with pytest.raises(ModelFileError, match='not a tokenizer'):
      Tokenizer.from_hf_dir(tmp_path)
  (tmp_path / 'tokenizer.json').write_bytes(whole)
  (tmp_path / 'tokenizer_config.json').write_text('[')
  with pytest.raises(ModelFileError, match='tokenizer_config.json: not valid JSON'):
    Tokenizer.from_hf_dir(tmp_path)
  (tmp_path / 'tokenizer_config.json').unlink()
  (tmp_path / 'chat_template.jinja').write_bytes(b'\xff')
  with pytest.raises(ModelFileError, match='not UTF-8'):
    Tokenizer.from_hf_dir(tmp_path)


def test_tokens_that_are_not_text_are_refused(make, gguf_metadata, tiny_config):
  metadata = gguf_metadata(tiny_config)
  tokens = metadata['tokenizer.ggml.tokens']
  metadata['tokenizer.ggml.tokens'] = [*tokens[:-1], '\udcff']
  with pytest.raises(ModelFileError, match='not UTF-8'):
    tokenizer_from_gguf(metadata, source='x.gguf')
