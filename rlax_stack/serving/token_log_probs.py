"""Log-probs of tokens as clients read them, every token as its own text.

Tokens may share a text; of those the likeliest keeps its place.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.rollout.requests import PromptScore

Pair = tuple[str, float]  # a token's text and log-prob


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
  """The text of each token alone, special ones too."""
  return [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


def floats(values: np.ndarray) -> list[float]:
  """float32 as float64, which JSON keeps exactly."""
  return values.astype(np.float64).tolist()


def likeliest(
  tokenizer: Tokenizer, ids: np.ndarray, values: np.ndarray, wanted: int
) -> list[list[Pair]]:
  """The `wanted` likeliest tokens of int32 ids [T, K] and float32 values [T, K] per position, likeliest first."""
  wanted = min(wanted, int((ids >= 0).sum(1).min(initial=wanted)))  # a tiny vocabulary has no more
  names = [pieces(tokenizer, row) for row in ids[:, :wanted].tolist()]
  rows = map(floats, values[:, :wanted])
  return [list(zip(*pair, strict=True)) for pair in zip(names, rows, strict=True)]


def by_text(pairs: Sequence[Pair]) -> dict[str, float]:
  """A mapping in the same order."""
  found: dict[str, float] = {}
  for text, value in pairs:
    found.setdefault(text, value)
  return found


def echo_log_probs(tokenizer: Tokenizer, score: PromptScore, wanted: int) -> dict[str, list[Any]]:
  """OpenAI's `logprobs` of a prompt: None where its first token would have numbers.

  With `wanted` of 0 there is no list of top_logprobs. `text_offset` counts characters of tokens, each alone.
  """
  tokens = pieces(tokenizer, score.tokens.tolist())
  offsets = np.cumsum([0, *map(len, tokens)])[:-1].tolist()
  found = {
    'tokens': tokens,
    'token_logprobs': [None, *floats(score.log_probs_t[1:])],
    'text_offset': offsets,
  }
  if wanted and score.top_ids_t is not None and score.top_log_probs_t is not None:
    tops = likeliest(tokenizer, score.top_ids_t[1:], score.top_log_probs_t[1:], wanted)
    found['top_logprobs'] = [None, *map(by_text, tops)]
  return found


def prompt_log_probs(
  tokenizer: Tokenizer, score: PromptScore, wanted: int
) -> list[dict[str, Any] | None]:
  """vLLM's `prompt_logprobs`: per token its own id and those of the `wanted` likeliest, to what is known of them."""
  if score.top_ids_t is None or score.top_log_probs_t is None or score.rank_t is None:
    raise ValueError('prompt_log_probs need a score with ranks: score the prompt with top above 0.')
  found: list[dict[str, Any] | None] = [None]
  for place in range(1, len(score.tokens)):
    own = int(score.tokens[place])
    known = {own: (float(score.log_probs_t[place]), int(score.rank_t[place]))}
    ids = score.top_ids_t[place, :wanted].tolist()
    for rank, token in enumerate(ids, start=1):
      known.setdefault(token, (float(score.top_log_probs_t[place, rank - 1]), rank))
    texts = pieces(tokenizer, known)
    found.append(
      {
        str(token): {'logprob': value, 'rank': rank, 'decoded_token': text}
        for (token, (value, rank)), text in zip(known.items(), texts, strict=True)
      }
    )
  return found
