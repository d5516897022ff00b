"""Our engine behind JetStream's `Engine` interface (google-jetstream 0.2.2), for its driver and its gRPC server.

The driver moves one token per slot and step and knows neither stop tokens nor the end of a sample before it reads them.
A scheduler of ours does the work behind it: it prefills a prompt when its slot is filled, once for equal prompts, and
decodes whole chunks, from which `generate` hands out one token per slot.

Needs the packages `google-jetstream` and `seqio`; only this module imports them. Parameters are an argument of every
call, as there: other ones are taken from the next chunk on.
"""

import dataclasses
import importlib
import inspect
import itertools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from rlax_stack.errors import ConfigError
from rlax_stack.models.tokenizer import Tokenizer
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.types import SamplingParams

_NO_BOS = -1  # stands where the driver puts a begin token that the model does not have


def _jetstream(name: str) -> ModuleType:
  try:
    return importlib.import_module(f'jetstream.engine.{name}')
  except ModuleNotFoundError as error:
    raise ConfigError(
      f"the JetStream adapter needs the package {error.name}. Run: pip install 'rlax-stack[jetstream]'."
    ) from error


engine_api: Any = _jetstream('engine_api')
tokenizer_api: Any = _jetstream('tokenizer_api')
tokenizer_pb2: Any = _jetstream('tokenizer_pb2')
token_utils: Any = _jetstream('token_utils')

if 'request_id' in inspect.signature(engine_api.Engine.prefill).parameters:
  raise ConfigError(
    'this JetStream is not the released one. Run: pip install google-jetstream==0.2.2.'
  )


class Weights(NamedTuple):
  """What JetStream calls params: a parameter tree of models/decoder.py and its version."""

  params: Any
  version: int


@dataclasses.dataclass
class _Slot:
  """A sample on its way through a slot of the driver."""

  group_id: int
  tokens: np.ndarray  # int32 [T], sampled so far
  read: int = 0  # of them, handed out
  ended: bool = False

  @property
  def starved(self) -> bool:
    """Whether only a decode chunk can bring its next token."""
    return not self.ended and self.read == len(self.tokens)


class JetStreamEngine(engine_api.Engine):
  """See above. For interleaved mode: one object prefills and generates.

  Args:
    scheduler: owned by the driver's generate thread from now on.
    sizes: of the scheduler's engine; max_prompt_tokens must be a power of two from 16 on, as JetStream's buckets are.
    weights: what `load_params` hands out.
    tokenizer: of the model.
    sampling: of every sample; the driver knows max_tokens only and cuts there.
  """

  def __init__(
    self,
    scheduler: Scheduler,
    *,
    sizes: EngineConfig,
    weights: Weights,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
  ):
    longest = sizes.max_prompt_tokens
    if longest < 16 or longest & (longest - 1):
      raise ConfigError(
        f'JetStream pads prompts to powers of two from 16 on, but max_prompt_tokens={longest}. '
        'Set config.rollout.max_prompt_tokens to one.'
      )
    self._scheduler, self._sizes, self._weights = scheduler, sizes, weights
    self._tokenizer = JetStreamTokenizer(tokenizer)
    self._sampling = dataclasses.replace(
      sampling, stop_token_ids=tuple(tokenizer.stop_token_ids), max_tokens=sizes.max_new_tokens
    )
    self._group_ids = itertools.count()
    self._mesh = jax.sharding.Mesh(np.asarray(jax.local_devices()[:1]), ('data',))

  def load_params(self, *args: Any, **kwargs: Any) -> Weights:
    """The weights that the engine was made with."""
    return self._weights

  def init_decode_state(self, *args: Any, **kwargs: Any) -> list[_Slot | None]:
    """Empty slots."""
    return [None] * self._sizes.slots

  def prefill(
    self,
    *,
    params: Weights,
    existing_prefix: Any = None,
    padded_tokens: Any,
    true_length: int,
  ) -> np.ndarray:
    """The prompt itself, int32 [P]: its KV is made when a slot is filled, and kept once for all who share it.

    A prompt that was too long has been cut to its end by the driver, which still gives the length before.
    """
    if existing_prefix is not None:
      raise NotImplementedError(
        'existing_prefix is not supported: the prefix table finds what is shared.'
      )
    tokens = np.asarray(padded_tokens, np.int32)
    if true_length > len(tokens):
      logging.warning('A prompt of %d tokens was cut to its last %d.', true_length, len(tokens))
    tokens = tokens[:true_length]
    return tokens[tokens != _NO_BOS]

  def insert(
    self, prefix: np.ndarray, decode_state: list[_Slot | None], slot: int
  ) -> list[_Slot | None]:
    """Starts a sample of a prompt in a slot; what ran there before is over."""
    before = decode_state[slot]
    if before is not None and not before.ended:
      self._scheduler.cancel(before.group_id)
    group_id = next(self._group_ids)
    self._scheduler.submit(
      GenerationRequest(
        group_id=group_id, sample_index=0, prompt_tokens=prefix, sampling=self._sampling
      )
    )
    decode_state[slot] = _Slot(group_id, np.zeros(0, np.int32))
    return decode_state

  def generate(
    self, params: Weights, decode_state: list[_Slot | None]
  ) -> tuple[list[_Slot | None], Any]:
    """The next token of every slot; one that has ended is not valid any more."""
    self._scheduler.swap_params(params.params, params.version)
    by_group = {slot.group_id: slot for slot in decode_state if slot is not None}
    while any(slot.starved for slot in by_group.values()):
      for sample in self._scheduler.step():
        ended = by_group[sample.request.group_id]
        ended.tokens, ended.ended = sample.tokens, True
      for (group_id, _), partial in self._scheduler.progress().items():
        by_group[group_id].tokens = partial.tokens
    data = np.zeros((len(decode_state), 3), np.int32)
    for row, slot in zip(data, decode_state, strict=True):
      if slot is None:
        continue
      if slot.read < len(slot.tokens):
        row[:2] = slot.tokens[slot.read], 1
      slot.read += 1
      row[2] = slot.read
    return decode_state, engine_api.ResultTokens(
      data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1
    )

  def get_prefix_destination_sharding(self) -> Any:
    """None: a prefix is a host array."""
    return None

  def get_tokenizer(self) -> Any:
    """Names nothing: `build_tokenizer` has it already."""
    return tokenizer_pb2.TokenizerParameters()

  def build_tokenizer(self, metadata: Any) -> Any:
    """The model's tokenizer in JetStream's shape."""
    return self._tokenizer

  @property
  def max_concurrent_decodes(self) -> int:
    """Slots."""
    return self._sizes.slots

  @property
  def samples_per_slot(self) -> int:
    """1: samples of one prompt share its KV across slots."""
    return 1

  @property
  def max_prefill_length(self) -> int:
    """Longest prompt in tokens."""
    return self._sizes.max_prompt_tokens

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """The one device that decodes."""
    return self._mesh

  @property
  def colocated_cpus(self) -> None:
    """None are needed."""
    return None


class JetStreamTokenizer(tokenizer_api.Tokenizer):
  """A tokenizer of models/tokenizer.py in JetStream's shape."""

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer

  def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
    """Tokens of a text, padded as the driver asks, and their number."""
    return token_utils.pad_tokens(self._tokenizer.encode(s), self.bos_id, self.pad_id, **kwargs)

  def decode(self, token_ids: list[int], **kwargs: Any) -> str:
    """Text of tokens."""
    return self._tokenizer.decode(token_ids)

  @property
  def pad_id(self) -> int:
    """Fills prompts; never read."""
    return 0

  @property
  def eos_id(self) -> int:
    """Ends a sequence."""
    return self._tokenizer.eos_id

  @property
  def bos_id(self) -> int:
    """What the driver puts before every prompt."""
    bos_id = self._tokenizer.bos_id
    return _NO_BOS if bos_id is None else bos_id

  @property
  def stop_tokens(self) -> set[int]:
    """Tokens that end a sample."""
    return set(self._tokenizer.stop_token_ids)
