"""The tokenizer that a GGUF file describes: byte-level BPE, split before merging as the file names it.

The name (`tokenizer.ggml.pre`) decides how digits, spaces and contractions are cut, hence every
token id; an unknown name is refused, since guessing would be silently wrong.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from rlax_stack.errors import ModelFileError
from rlax_stack.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # token types; control tokens are special
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
_LLAMA3 = _CONTRACTIONS + r'|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}' + _REST
_QWEN2 = _CONTRACTIONS + r'|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}' + _REST


def _by_regex(pattern: str) -> Any:
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(Regex(pattern), behavior='isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


def _gpt2() -> Any:
  return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
  return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS = {
  'default': _gpt2,
  'gpt-2': _gpt2,
  'smollm': _smollm,
  'llama3': lambda: _by_regex(_LLAMA3),
  'llama-v3': lambda: _by_regex(_LLAMA3),
  'llama-bpe': lambda: _by_regex(_LLAMA3),
  'qwen2': lambda: _by_regex(_QWEN2),
  'deepseek-r1-qwen': lambda: _by_regex(_QWEN2),
}
_LLAMA3_NAMES = ('llama3', 'llama-v3', 'llama-bpe')
_QWEN_NAMES = ('qwen2', 'deepseek-r1-qwen')


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, source: str) -> Tokenizer:
  """Builds the tokenizer of the file.

  Raises:
    ModelFileError: another kind of vocabulary, an unknown pre-tokenizer, or tokens, types and
      merges that do not fit each other.
  """
  model = metadata.get('tokenizer.ggml.model')
  if model != 'gpt2':
    raise ModelFileError(
      f'{source}: tokenizer model {model!r} is not supported, only gpt2 (byte-level BPE). '
      'Load the Hugging Face directory of the model instead.'
    )
  pre = metadata.get('tokenizer.ggml.pre', 'default')
  if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
    raise ModelFileError(
      f'{source}: pre-tokenizer {pre!r} is not known, only {", ".join(_PRE_TOKENIZERS)}. '
      'Load the Hugging Face directory of the model instead.'
    )
  tokens, types = _tokens(metadata, source)
  backend = tokenizers.Tokenizer(_bpe(metadata, source, tokens, ignore_merges=pre in _LLAMA3_NAMES))
  backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
  backend.decoder = decoders.ByteLevel()
  if pre in _QWEN_NAMES:
    backend.normalizer = normalizers.NFC()
  for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    added = [tokens[token] for token in np.flatnonzero(types == kind)]
    backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in added])
  ids = {name: _token_id(metadata, name, source, len(tokens)) for name in ('eos', 'bos', 'eot')}
  ids['pad'] = _token_id(metadata, 'padding', source, len(tokens))
  if ids['eos'] is None:
    raise ModelFileError(f'{source}: tokenizer.ggml.eos_token_id is missing.')
  template = metadata.get('tokenizer.chat_template')
  return Tokenizer(
    backend,
    eos_id=ids['eos'],
    bos_id=ids['bos'],
    pad_id=ids['pad'],
    stop_token_ids=[token for token in (ids['eot'],) if token is not None],
    chat_template=template if isinstance(template, str) else None,
    add_bos=metadata.get('tokenizer.ggml.add_bos_token', pre in _LLAMA3_NAMES) is True,
  )


def _tokens(metadata: Mapping[str, Any], source: str) -> tuple[list[str], np.ndarray]:
  tokens = metadata.get('tokenizer.ggml.tokens')
  if not isinstance(tokens, list) or not tokens or len(set(tokens)) != len(tokens):
    raise ModelFileError(f'{source}: tokenizer.ggml.tokens is missing, or a token occurs twice.')
  for text in tokens:
    if not text.isprintable() and not _is_text(text):
      raise ModelFileError(f'{source}: a token is not UTF-8: {text!r}.')
  types = metadata.get('tokenizer.ggml.token_type')
  if types is None:
    return tokens, np.ones(len(tokens), np.int32)
  if not isinstance(types, np.ndarray) or types.shape != (len(tokens),):
    raise ModelFileError(f'{source}: tokenizer.ggml.token_type does not fit {len(tokens)} tokens.')
  return tokens, types


def _bpe(
  metadata: Mapping[str, Any], source: str, tokens: list[str], *, ignore_merges: bool
) -> models.BPE:
  merges = metadata.get('tokenizer.ggml.merges')
  if not isinstance(merges, list):
    raise ModelFileError(f'{source}: tokenizer.ggml.merges is missing.')
  pairs = [tuple(merge.split(' ')) for merge in merges]
  vocabulary = {text: token for token, text in enumerate(tokens)}
  for pair in pairs:
    # The library would raise, or panic, on what it does not know.
    if len(pair) != 2 or any(part not in vocabulary for part in (*pair, ''.join(pair))):
      raise ModelFileError(f'{source}: merge {" ".join(pair)!r} is not of two known tokens.')
  return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges)


def _token_id(metadata: Mapping[str, Any], name: str, source: str, count: int) -> int | None:
  value = metadata.get(f'tokenizer.ggml.{name}_token_id')
  if value is not None and (type(value) is not int or not 0 <= value < count):
    raise ModelFileError(f'{source}: tokenizer.ggml.{name}_token_id {value!r} is no token.')
  return value


def _is_text(text: str) -> bool:
  """False where bytes of the file that are not UTF-8 were kept as lone surrogates."""
  return not any('\ud800' <= character <= '\udfff' for character in text)
