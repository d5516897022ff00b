"""Tokens per second of one optimizer step, against what the machine's matrix products allow.

  python -m benchmarks.learner_step

Workloads, on a decoder of SmolLM2-135M's shape: W3 is 8 groups of 8 samples, 64 prompt and 64
sampled tokens; W4 is 2 groups of 8, 1,024 and 64. Tokens are counted as if every sequence were
separate (prompt and completion, sample by sample). The limit counts what cannot be avoided (each prompt once, the LM
head at sampled tokens only, attention over visible pairs only, backward twice forward), each product at the rate that
it reaches alone and attention at the best of those, measured after every step; means are compared with means, because a
shared machine changes its pace. `ratio_to_best_moments` divides by the limit that the shortest call of each product
gives. The last line is JSON.
"""

from rlax_stack import huge_pages

if __name__ == '__main__':  # before anything large is imported
  huge_pages.restart_with_huge_pages()

import json
import resource
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from benchmarks import limits
from benchmarks.batches import Workload, make_groups
from rlax_stack.learner.optimizer import OptimizerSettings, make_optimizer
from rlax_stack.learner.packing import pack_groups, pack_separate
from rlax_stack.learner.precision import COMPUTE_DTYPES, resolve_compute_dtype
from rlax_stack.learner.row_plan import RowPlan, plan_rows
from rlax_stack.learner.scoring import ForwardSettings
from rlax_stack.learner.state import init_state
from rlax_stack.learner.train_step import make_train_step
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.remat import REMAT_POLICIES
from rlax_stack.models.shapes import SHAPES
from rlax_stack.objectives.objective import resolve
from rlax_stack.sharding import make_mesh

_HEAD_ROWS = 512  # rows of the LM head's products as measured; more run at the same rate

WORKLOADS = {'W3': Workload(8, 8, 64, 64), 'W4': Workload(2, 8, 1024, 64)}

_WORKLOADS = flags.DEFINE_list('workloads', sorted(WORKLOADS), 'which of W3, W4')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'measured steps of each layout; their mean counts')
_UNPACKED = flags.DEFINE_bool('unpacked', True, 'measure one row per sequence as well')
_DTYPE = flags.DEFINE_enum('compute_dtype', 'auto', COMPUTE_DTYPES, 'of activations')
_MICRO = flags.DEFINE_integer('micro_batch_tokens', 1152, 'tokens computed at once, about')
_REMAT = flags.DEFINE_enum('remat', 'none', list(REMAT_POLICIES), 'what backward keeps')


def step_products(config: ModelConfig, tokens: int) -> dict[str, limits.Product]:
  """The products of forward, of the input's gradient and of the kernel's, over `tokens` at once."""
  forward = limits.layer_products(config, tokens)
  forward['head'] = limits.head_product(config, min(tokens, _HEAD_ROWS))
  products = {}
  for name, (rows, inside, outside) in forward.items():
    products[f'forward/{name}'] = limits.Product(rows, inside, outside)
    products[f'input/{name}'] = limits.Product(rows, outside, inside)
    products[f'kernel/{name}'] = limits.Product(outside, rows, inside)
  return products


def least_seconds(
  config: ModelConfig, work: Workload, meter: limits.Meter, *, shortest: bool = False
) -> float:
  """Forward and backward with each prompt computed once, from the rates of `meter`."""
  prompt, sampled = work.prompt_tokens, work.sampled_tokens
  # The last sampled token predicts nothing, so it need not be computed.
  branch = sampled - 1
  tokens = prompt + work.group_size * branch
  pairs = prompt * (prompt + 1) / 2 + work.group_size * branch * (prompt + (branch + 1) / 2)
  needed = limits.layer_products(config, config.num_layers * tokens)
  needed['head'] = limits.head_product(config, work.group_size * sampled)
  rates = {
    f'{kind}/{name}': meter.flops_per_s(f'{kind}/{name}')[shortest]
    for kind in ('forward', 'input', 'kernel')
    for name in needed
  }
  products_s = sum(needed[key.split('/')[1]].flops / rate for key, rate in rates.items())
  attention_s = 3.0 * limits.attention_flops(config, pairs) / max(rates.values())
  return work.groups * (products_s + attention_s)


def _plan(work: Workload, separate: bool) -> RowPlan:
  size = 1 if separate else work.group_size
  return plan_rows(
    groups_per_batch=work.groups * work.group_size // size,
    group_size=size,
    max_prompt_tokens=work.prompt_tokens,
    max_tokens=work.sampled_tokens,
    micro_batch_tokens=_MICRO.value,
  )


class Bench:
  """One learner state and the steps that run on it; `meter` measures the machine after each."""

  def __init__(self, config: ModelConfig, dtype: Any, meter: limits.Meter):
    self._config, self._meter = config, meter
    self._mesh = make_mesh({}, jax.devices()[:1])
    self._optimizer = OptimizerSettings(learning_rate=1e-6, warmup_steps=10)
    self._forward = ForwardSettings(compute_dtype=dtype, remat=_REMAT.value)
    params = decoder.init_params(config, jax.random.key(0))
    self._state = init_state(params, make_optimizer(self._optimizer), self._mesh)

  def seconds(self, work: Workload, *, separate: bool) -> dict[str, float]:
    """Time of the first step, compilation included, and the mean of those after it."""
    step = make_train_step(
      self._config,
      self._mesh,
      forward=self._forward,
      objective=resolve(),
      optimizer=self._optimizer,
    )
    plan, groups = _plan(work, separate), make_groups(self._config, work)
    pack = pack_separate if separate else pack_groups
    adv = [np.linspace(-1, 1, work.group_size, dtype=np.float32) for _ in groups]
    packed = pack(groups, adv, row_shapes=[plan.shape], rows_multiple=plan.micro_batch_rows)
    micro = packed.tokens.shape[0] // plan.micro_batch_rows
    batch = jax.tree.map(
      lambda x: jax.device_put(x.reshape(micro, plan.micro_batch_rows, *x.shape[1:])), packed
    )
    times = []
    for run in range(_REPEATS.value + 1):
      start = time.perf_counter()
      self._state, metrics = step(self._state, batch, jax.numpy.int32(micro))
      jax.block_until_ready((self._state, metrics))
      times.append(time.perf_counter() - start)
      logging.info('%s micro-batches of %s rows of %s: %.2f s', micro, *_sizes(plan), times[-1])
      if run:
        self._meter.measure()
    return {'first': times[0], 'mean': float(np.mean(times[1:]))}


def _sizes(plan: RowPlan) -> tuple[int, int]:
  return plan.micro_batch_rows, plan.shape.length


def _peak_gib() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _measure(config: ModelConfig, name: str, dtype: Any) -> dict[str, float]:
  work = WORKLOADS[name]
  counted = work.groups * work.group_size * (work.prompt_tokens + work.sampled_tokens)
  products = step_products(config, _MICRO.value)
  meter = limits.Meter(products, dtype)
  bench = Bench(config, dtype, meter)
  packed = bench.seconds(work, separate=False)
  least_s = least_seconds(config, work, meter)
  result = {
    'tokens_per_s': counted / packed['mean'],
    'limit_tokens_per_s': counted / least_s,
    'ratio_to_limit': least_s / packed['mean'],
    'ratio_to_best_moments': least_seconds(config, work, meter, shortest=True) / packed['mean'],
    'step_s': packed['mean'],
    'first_step_s': packed['first'],
    'gflop_per_s': max(meter.flops_per_s(product).mean for product in products) / 1e9,
    'peak_gib': _peak_gib(),
  }
  if _UNPACKED.value:
    separate = bench.seconds(work, separate=True)
    result['unpacked_tokens_per_s'] = counted / separate['mean']
    result['packed_speedup'] = separate['mean'] / packed['mean']
    result['unpacked_peak_gib'] = _peak_gib()
  return {key: round(value, 3) for key, value in result.items()}


def main(argv):
  """Prints a table and one line of JSON."""
  del argv
  dtype = resolve_compute_dtype(_DTYPE.value)
  results = {}
  for name in _WORKLOADS.value:
    results[name] = _measure(SHAPES['smollm2_135m'], name, dtype)
    lines = (f'  {key:24s}{value:12.2f}' for key, value in results[name].items())
    print('\n'.join([f'{name} {WORKLOADS[name]}', *lines]))
  ratios = [result['ratio_to_limit'] for result in results.values()]
  print(
    json.dumps(
      {
        'benchmark': 'learner_step',
        'dtype': np.dtype(dtype).name,
        'ratio_to_limit': min(ratios),
        **results,
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
