"""Workload LT of benchmarks/rollout.py: answers of very different lengths, through coordinator, worker and engine.

Lengths are log-normal, 8-fold between the 5th and the 95th percentile, and forced by max_tokens, so that they are the
same everywhere. Batches of 4 groups x 4 samples come from 16 slots in two ways:

  static    no group in flight beyond the batch: 16 samples start together, the next 16 when the longest has ended
  carried   three batches of groups in flight: slots stay full, the unfinished go on under the next weights

The learner takes no time and publishes after every batch, so each batch costs one swap of all weights.
"""

import dataclasses
import itertools
import time
from typing import Any, NamedTuple

import numpy as np

from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.fleet.local_runtime import LocalRuntime
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.models.config import ModelConfig
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.worker import RolloutWorker
from rlax_stack.types import Message, Prompt, Reward, SamplingParams

_SLOTS, _GROUP, _BATCH = 16, 4, 4
# The longest sample lasts for about five batches: so many versions it grows old.
_IN_FLIGHT, _MAX_STALENESS = 3 * _BATCH, 8
_MEDIAN, _SIGMA, _LONGEST = 32.0, np.log(8) / (2 * 1.645), 192
_PROMPT_TOKENS = 16
_STATIC_BATCHES, _CARRIED_BATCHES = 5, 12


def sample_length(group_id: int, sample_index: int) -> int:
  """Tokens of a sample: a pure function of its identity, 1 to 192."""
  random = np.random.default_rng([group_id, sample_index])
  length = np.exp(np.log(_MEDIAN) + _SIGMA * random.standard_normal())
  return int(np.clip(length, 1, _LONGEST))


class ForcedLengths(Scheduler):
  """A scheduler whose samples end at `sample_length`."""

  def submit(self, request: GenerationRequest) -> None:
    """Queues a sample, with its own max_tokens."""
    sampling = dataclasses.replace(request.sampling, max_tokens=sample_length(*request.identity))
    super().submit(dataclasses.replace(request, sampling=sampling))


class _Tokenizer:
  """Prompts of random tokens; nothing stops a sample before its length."""

  stop_token_ids = ()

  def __init__(self, vocab_size: int):
    self._vocab_size = vocab_size

  def encode_chat(self, messages: Any) -> np.ndarray:
    random = np.random.default_rng(int(messages[0].content))
    return random.integers(0, self._vocab_size, _PROMPT_TOKENS).astype(np.int32)

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def decode(self, ids: Any) -> str:
    return str(len(ids))


class Run(NamedTuple):
  """What one way of filling batches cost."""

  batch_s: float  # mean time to a full batch, the first left out
  tokens_per_s: float
  occupancy: float  # rows that decode, of slots, per decode step
  swap_s: float  # mean
  chunk_s: float  # mean
  steps_per_chunk: float  # mean; a chunk ends early to refill slots
  outside_share: float  # of the wall time, neither prefill, insert, decode nor swap
  carried: int  # half-done samples that went on under newer weights
  late: float  # mean staleness of the trained samples


def measure_stream(engine: Engine, params: Any, *, groups_in_flight: int, batches: int) -> Run:
  """Batches through coordinator and worker, as in a run."""
  numbers = itertools.count()
  coordinator = Coordinator(
    lambda: _prompt(next(numbers)),
    group_size=_GROUP,
    groups_per_batch=_BATCH,
    max_staleness=_MAX_STALENESS,
    groups_in_flight=groups_in_flight,
    lease_timeout_s=600.0,
  )
  server = ParameterServer()
  worker = RolloutWorker(
    ForcedLengths(engine),
    tokenizer=_Tokenizer(engine.config.vocab_size),
    score=lambda texts, prompts: [Reward(value=0.0) for _ in texts],
    sampling=SamplingParams(max_tokens=_LONGEST),
  )
  server.publish(0, params, copy=False)
  worker.warm_up(server.latest())
  swaps, swap_s = worker.stats.swaps, worker.stats.swap_s
  stats = worker.scheduler.stats
  times, ages = [], []
  with LocalRuntime(worker, coordinator=coordinator, parameter_server=server):
    times.append(time.perf_counter())
    for version in range(batches):
      coordinator.on_published(version)
      groups = coordinator.next_batch(version, timeout_s=600.0)
      times.append(time.perf_counter())
      coordinator.mark_trained(groups)
      ages += [version - t.oldest_version for group in groups for t in group.trajectories]
      server.publish(version + 1, params, copy=False)
    seconds = times[-1] - times[0]
    sampled, swaps = stats.sampled_tokens, worker.stats.swaps - swaps
    swap_s = worker.stats.swap_s - swap_s
    busy_s = stats.prefill_s + stats.insert_s + stats.decode_s + swap_s
    return Run(
      batch_s=(times[-1] - times[1]) / (batches - 1),
      tokens_per_s=sampled / seconds,
      occupancy=stats.row_steps / stats.slot_steps,
      swap_s=swap_s / max(1, swaps),
      chunk_s=stats.decode_s / stats.chunks,
      steps_per_chunk=stats.decode_steps / stats.chunks,
      outside_share=max(0.0, 1 - busy_s / seconds),
      carried=stats.carried_samples,
      late=float(np.mean(ages)),
    )


def _prompt(number: int) -> Prompt:
  message = Message(role='user', content=str(number))
  return Prompt(prompt_id=str(number), messages=(message,), answer='')


def measure_long_tail(config: ModelConfig, params: Any, dtype: Any) -> dict[str, float]:
  """The figures of workload LT, by name; seconds, tokens per second and ratios."""
  sizes = EngineConfig(
    slots=_SLOTS,
    max_prompt_tokens=_PROMPT_TOKENS,
    max_new_tokens=_LONGEST,
    prefill_tokens=_PROMPT_TOKENS,  # prompts come one by one, and padding costs as much as a prompt
    compute_dtype=dtype,
  )
  engine = Engine(config, sizes)
  static = measure_stream(engine, params, groups_in_flight=_BATCH, batches=_STATIC_BATCHES)
  carried = measure_stream(engine, params, groups_in_flight=_IN_FLIGHT, batches=_CARRIED_BATCHES)
  return {
    'static_tokens_per_s': static.tokens_per_s,
    'tokens_per_s': carried.tokens_per_s,
    'ratio_to_static': carried.tokens_per_s / static.tokens_per_s,
    'static_slot_occupancy': static.occupancy,
    'slot_occupancy': carried.occupancy,
    'static_batch_s': static.batch_s,
    'batch_s': carried.batch_s,
    'batch_time_cut': 1 - carried.batch_s / static.batch_s,
    'swap_s': carried.swap_s,
    'decode_chunk_s': carried.chunk_s,
    'swap_per_chunk': carried.swap_s / carried.chunk_s,
    'steps_per_chunk': carried.steps_per_chunk,
    'outside_share': carried.outside_share,
    'carried_samples': carried.carried,
    'mean_staleness': carried.late,
  }
