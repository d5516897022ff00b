"""Text to tokens and back, and chats to tokens: the one tokenizer class of the project.

It wraps `tokenizers.Tokenizer` and knows the model's special tokens and chat template. Special
tokens written out in a text become those tokens, as in transformers; `encode` adds none on its own.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from rlax_stack.errors import ModelFileError
from rlax_stack.models.chat_template import Turn, render_chat, render_plain
from rlax_stack.models.json_file import read_bytes, read_json_object

_TOKENIZER_LIMIT = 256 * 2**20  # bytes; the largest published have about 33 MB
_CONFIG_LIMIT = 16 * 2**20
# Tokens that end a turn in the families of the project, whatever the file calls end of sequence.
_END_OF_TURN = ('<|im_end|>', '<|eot_id|>', '<|eom_id|>', '<end_of_turn>')


class Tokenizer:
  """Tokens of one model.

  Attributes:
    eos_id: ends a sequence.
    bos_id: begins one, or None.
    pad_id: fills rows, or None.
    stop_token_ids: sorted; any of them ends an answer (end of sequence, end of turn).
    chat_template: Jinja source, or None.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    eos_id: int,
    bos_id: int | None = None,
    pad_id: int | None = None,
    stop_token_ids: Iterable[int] = (),
    chat_template: str | None = None,
    add_bos: bool = False,
  ):
    """Wraps `backend`. `stop_token_ids` are stops beside `eos_id` and known end-of-turn tokens.

    add_bos: chats without a template begin with `bos_id`.

    Raises:
      ModelFileError: a special token that the vocabulary does not have.
    """
    self._backend = backend
    turns = [backend.token_to_id(text) for text in _END_OF_TURN]
    stops = {eos_id, *stop_token_ids, *(token for token in turns if token is not None)}
    for token in {*stops, bos_id, pad_id} - {None}:
      if type(token) is not int or not 0 <= token < 2**31 or backend.id_to_token(token) is None:
        raise ModelFileError(f'tokenizer: special token {token!r} is not in the vocabulary.')
    self.eos_id = eos_id
    self.bos_id = bos_id
    self.pad_id = pad_id
    self.stop_token_ids = tuple(sorted(stops))
    self.chat_template = chat_template
    self._add_bos = add_bos and bos_id is not None

  @property
  def vocab_size(self) -> int:
    """One above the largest token id, added tokens included. An embedding may have more rows."""
    return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

  def encode(self, text: str) -> np.ndarray:
    """Tokens of `text`, int32 [T]. No begin or end token is added."""
    return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

  def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """Text of `ids`. Bytes that are no whole character become U+FFFD."""
    return self._backend.decode(
      [int(token) for token in ids], skip_special_tokens=skip_special_tokens
    )

  def id_to_piece(self, token: int) -> str | None:
    """The vocabulary's spelling of a token (bytes as printable characters), None if unknown."""
    return self._backend.id_to_token(int(token))

  def piece_to_id(self, piece: str) -> int | None:
    """The token of a vocabulary spelling, or None."""
    return self._backend.token_to_id(piece)

  def render_chat(
    self,
    messages: Sequence[Turn],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> str:
    """The text of a chat, by the model's template, or `Role: content` lines where it has none.

    Raises:
      ModelFileError: the template refuses the messages, does not know tools, or is hostile.
    """
    if tools and 'tools' not in (self.chat_template or ''):
      raise ModelFileError(
        'chat template: this model has no place for tools. Describe them in a message, or use a '
        'model whose template takes tools.'
      )
    if self.chat_template is None:
      text = render_plain(messages, add_generation_prompt=add_generation_prompt)
      if self._add_bos and self.bos_id is not None:
        return (self.id_to_piece(self.bos_id) or '') + text
      return text
    return render_chat(
      self.chat_template,
      messages,
      add_generation_prompt=add_generation_prompt,
      special_tokens=self._special_tokens(),
      tools=tools,
    )

  def encode_chat(
    self,
    messages: Sequence[Turn],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> np.ndarray:
    """Tokens of a chat, int32 [T]; see `render_chat`."""
    text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools)
    return self.encode(text)

  def save(self, path: pathlib.Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json there."""
    directory = pathlib.Path(path)
    config = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'clean_up_tokenization_spaces': False,
      'add_bos_token': self._add_bos,
      **self._special_tokens(),
    }
    if self.chat_template is not None:
      config['chat_template'] = self.chat_template
    generation = {'eos_token_id': [self.eos_id, *(set(self.stop_token_ids) - {self.eos_id})]}
    for name in ('bos', 'pad'):
      token = getattr(self, f'{name}_id')
      if token is not None:
        generation[f'{name}_token_id'] = token
    self._backend.save(str(directory / 'tokenizer.json'))
    _write_json(directory / 'tokenizer_config.json', config)
    _write_json(directory / 'generation_config.json', generation)

  @classmethod
  def from_hf_dir(cls, path: str | pathlib.Path) -> 'Tokenizer':
    """Reads tokenizer.json; tokenizer_config.json, chat_template.jinja, generation_config.json too.

    Raises:
      ModelFileError: tokenizer.json is missing, a file is malformed, or none names an
        end-of-sequence token.
    """
    directory = pathlib.Path(path)
    backend = _read_backend(directory / 'tokenizer.json')
    config = _optional_json(directory / 'tokenizer_config.json')
    generation = _optional_json(directory / 'generation_config.json')
    model = _optional_json(directory / 'config.json')
    ids = {}
    for name in ('eos', 'bos', 'pad'):
      ids[name] = _special_id(backend, config.get(f'{name}_token'))
    stops = _id_list(generation.get('eos_token_id')) or _id_list(model.get('eos_token_id'))
    if ids['eos'] is None:
      if not stops:
        raise ModelFileError(
          f'{directory}: no end-of-sequence token. Set eos_token in tokenizer_config.json.'
        )
      ids['eos'] = stops[0]
    return cls(
      backend,
      eos_id=ids['eos'],
      bos_id=ids['bos'],
      pad_id=ids['pad'],
      stop_token_ids=stops,
      chat_template=_chat_template(directory, config),
      add_bos=bool(config.get('add_bos_token', ids['bos'] is not None)),
    )

  def _special_tokens(self) -> dict[str, str]:
    named = {'bos_token': self.bos_id, 'eos_token': self.eos_id, 'pad_token': self.pad_id}
    return {
      name: piece
      for name, token in named.items()
      if token is not None and (piece := self.id_to_piece(token)) is not None
    }


def _read_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
  if not path.exists():
    raise ModelFileError(
      f'{path}: missing. Only tokenizer.json is read: save the tokenizer in its fast form.'
    )
  text = read_bytes(path, size_limit=_TOKENIZER_LIMIT)
  try:
    return tokenizers.Tokenizer.from_buffer(text)
  except Exception as error:  # the library raises plain Exception
    raise ModelFileError(
      f'{path}: not a tokenizer ({str(error)[:200]}). Download the file again.'
    ) from error


def _optional_json(path: pathlib.Path) -> dict[str, Any]:
  return read_json_object(path, size_limit=_CONFIG_LIMIT) if path.exists() else {}


def _special_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
  """The id of a special token, given as a string or as an object with its content."""
  content = token.get('content') if isinstance(token, Mapping) else token
  return backend.token_to_id(content) if isinstance(content, str) else None


def _id_list(value: Any) -> list[int]:
  ids = value if isinstance(value, list) else [value]
  return [token for token in ids if type(token) is int]


def _chat_template(directory: pathlib.Path, config: Mapping[str, Any]) -> str | None:
  """chat_template.jinja before tokenizer_config.json; of several named ones, 'default'."""
  file = directory / 'chat_template.jinja'
  if file.exists():
    try:
      return read_bytes(file, size_limit=_CONFIG_LIMIT).decode('utf-8')
    except UnicodeDecodeError as error:
      raise ModelFileError(f'{file}: not UTF-8. Download the file again.') from error
  template = config.get('chat_template')
  if isinstance(template, list):
    named = {
      item.get('name'): item.get('template') for item in template if isinstance(item, Mapping)
    }
    template = named.get('default')
  return template if isinstance(template, str) else None


def _write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + '\n', encoding='utf-8')
