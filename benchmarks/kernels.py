"""What the attention kernels visit and read, against what is needed, and what that is worth on this machine.

  python -m benchmarks.kernels

The first table is counted, not measured: for a group of G samples of S tokens after a prompt of P, the pairs of blocks
that tree attention visits against those that hold anything and against G separate sequences, and the bytes of keys and
values that a decode step reads against P + G S tokens and against G (P + S). The second is measured here: one attention
forward and backward over the packed group, on a CPU the same rows with a dense mask, and G separate rows, in the form
that this device takes, with the TFLOP/s of the pairs that are needed; below it the same of other people's kernels over
separate rows (`kernel_peers`), or why one does not run here. The third is a decode step that shares prompts, one that
reads every row by itself, and one over rows that hold a copy of their prompt, with the GB/s of the keys and values that
each has to read. Gains are over separate sequences, and are divided by those that the counts promise; of a decode
step over the quicker of the two that do not share, of the form that shares and of the one that the engine's cost
model takes. On a GPU or TPU heads are those of an 8B model, in bfloat16. The last line is JSON.
"""

import functools
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import kernel_peers
from rlax_stack.pallas_kernels import block_tables
from rlax_stack.pallas_kernels.decode_work import PrefixView, make_work_list, rows_per_read
from rlax_stack.pallas_kernels.shared_prefix_decode import plan_decode, shared_prefix_decode
from rlax_stack.pallas_kernels.tree_attention import tree_attention

_REPEATS = flags.DEFINE_integer('repeats', 5, 'timed calls of each form; the shortest counts')
_BLOCK = flags.DEFINE_integer('block', 512, 'tokens in a block of the counted table')


class Case(NamedTuple):
  """A group: samples, and tokens of its prompt and of each sample."""

  samples: int
  prompt: int
  suffix: int

  @property
  def packed(self) -> int:
    """Tokens of the packed group."""
    return self.prompt + self.samples * self.suffix

  @property
  def separate(self) -> int:
    """Tokens of the samples, each with the prompt before it."""
    return self.samples * (self.prompt + self.suffix)


COUNTED = (
  Case(8, 512, 512),
  Case(8, 4096, 1024),
  Case(16, 4096, 1024),
  Case(16, 2048, 2048),
  Case(8, 16384, 2048),
)


class Model(NamedTuple):
  """Heads of queries and of keys, their width, and the dtype."""

  heads: int
  kv_heads: int
  width: int
  dtype: Any


class Setting(NamedTuple):
  """What is measured on one kind of device."""

  model: Model
  training: tuple[Case, ...]
  decode: tuple[Case, ...]
  dense: bool  # whether the dense mask is timed as well


# Scaled down: the ratios of 4,096 + 1,024 with 8 samples, and of short prompts; SmolLM2-135M's heads. Then decode steps
# in which sharing has little to give.
_ON_CPU = Setting(
  Model(9, 3, 64, jnp.float32),
  (Case(8, 1024, 256), Case(8, 128, 128)),
  (Case(16, 2048, 64), Case(8, 64, 64), Case(8, 64, 512), Case(4, 64, 512), Case(2, 64, 512)),
  dense=True,
)
# Heads of Llama-3-8B and Qwen3-8B.
_ON_ACCELERATOR = Setting(
  Model(32, 8, 128, jnp.bfloat16),
  (Case(8, 512, 512), Case(8, 4096, 1024), Case(16, 4096, 1024)),
  (Case(16, 4096, 1024), Case(8, 512, 512), Case(8, 64, 512), Case(2, 64, 512)),
  dense=False,
)


def layout(case: Case, tokens: int) -> tuple[np.ndarray, np.ndarray]:
  """Positions and subtree ends of the packed group in a row of `tokens`, int32 [tokens]."""
  index = np.arange(tokens)
  sample = np.maximum(index - case.prompt, 0) // case.suffix
  inside = index < case.packed
  ends = np.where(index < case.prompt, case.packed, case.prompt + (sample + 1) * case.suffix)
  positions = np.where(
    index < case.prompt, index, case.prompt + (index - case.prompt) % case.suffix
  )
  ends, positions = np.where(inside, ends, index + 1), np.where(inside, positions, 0)
  return positions.astype(np.int32), ends.astype(np.int32)


def needed_blocks(ends: np.ndarray, block: int) -> int:
  """Pairs of blocks in which some token sees another one, found token by token."""
  index, count = np.arange(len(ends)), 0
  for first in range(0, len(ends), block):
    rows = index[first : first + block, None]
    seen = (index[None] <= rows) & (rows < ends[None]) & (ends[None] > index[None] + 1)
    count += int(seen.reshape(len(rows), -1, block).any((0, 2)).sum())
  return count


def count_case(case: Case, block: int) -> dict[str, float]:
  """The counted table's row."""
  tokens = -(-case.packed // block) * block
  positions, ends = layout(case, tokens)
  kinds = block_tables.block_kinds(
    jnp.asarray(positions)[None],
    jnp.asarray(np.where(ends == np.arange(tokens) + 1, 0, ends))[None],
    block_q=block,
    block_kv=block,
  )
  visited = int(block_tables.block_list(kinds).count[0])
  alone = -(-(case.prompt + case.suffix) // block)
  work = make_work_list(
    [PrefixView(pages=tuple(range(-(-case.prompt // 128))), length=case.prompt)] * case.samples,
    page_size=128,
    rows_per_block=case.samples,
    max_items=case.prompt,
  )
  read = int(work.item_length.sum()) + case.samples * case.suffix
  return {
    'visited': visited,
    'needed': needed_blocks(ends, block),
    'separate': case.samples * alone * (alone + 1) // 2,
    'flops_to_ideal': visited * block * block / packed_pairs(case),
    'token_gain': case.separate / case.packed,
    'decode_tokens_read': read,
    'decode_to_ideal': read / case.packed,
    'decode_gain': case.separate / read,
  }


def call_times(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
  """Seconds of each call, after one that compiles; they take turns, so that all meet the same machine."""
  for call in calls.values():
    jax.block_until_ready(call())
  times: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(repeats):
    for name, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      times[name].append(time.perf_counter() - start)
  return times


def shortest_s(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
  """Shortest time of each call."""
  return {name: min(times) for name, times in call_times(calls, repeats).items()}


def _draw(rng: np.random.Generator, dtype: Any, *shape: int) -> jax.Array:
  return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def _rows(model: Model, rows: int, tokens: int) -> tuple[jax.Array, ...]:
  """Queries, keys and values."""
  rng = np.random.default_rng(0)
  heads = (model.heads, model.kv_heads, model.kv_heads)
  return tuple(_draw(rng, model.dtype, rows, tokens, count, model.width) for count in heads)


@functools.partial(jax.jit, static_argnames='implementation')
def _step(q, k, v, positions, ends, implementation):
  """Output and gradients, the output standing for its own cotangent."""

  def attend(q, k, v):
    return tree_attention(q, k, v, positions, ends, implementation=implementation)

  out, pull = jax.vjp(attend, q, k, v)
  return out, pull(out)


def packed_pairs(case: Case) -> float:
  """Pairs of a query and a key that it sees, of the packed group."""
  return case.prompt**2 / 2 + case.samples * case.suffix * (case.prompt + case.suffix / 2)


def separate_pairs(case: Case) -> float:
  """The same of its samples, each with the prompt before it."""
  return case.samples * (case.prompt + case.suffix) ** 2 / 2


def tflops(pairs: float, model: Model, seconds: float) -> float:
  """TFLOP/s of forward and backward: 3.5 times the two products of the forward pass."""
  return 3.5 * 4 * model.width * model.heads * pairs / seconds / 1e12


def time_training(case: Case, setting: Setting, repeats: int) -> dict[str, float]:
  """Seconds of forward and backward: packed, with a dense mask, and separate."""
  model = setting.model

  def step(rows: int, tokens: int, tree: tuple[np.ndarray, np.ndarray], implementation: str):
    positions, ends = (jnp.broadcast_to(jnp.asarray(x)[None], (rows, tokens)) for x in tree)
    arrays = (*_rows(model, rows, tokens), positions, ends)
    return functools.partial(_step, *arrays, implementation)

  length = case.prompt + case.suffix
  causal = np.arange(length, dtype=np.int32), np.full(length, length, np.int32)
  tree = layout(case, case.packed)
  calls = {'packed_s': step(1, case.packed, tree, 'auto')}
  if setting.dense:
    calls['dense_s'] = step(1, case.packed, tree, 'reference')
  calls['separate_s'] = step(case.samples, length, causal, 'auto')
  seconds = shortest_s(calls, repeats)
  gain = seconds['separate_s'] / seconds['packed_s']
  return seconds | {
    'packed_tflops': tflops(packed_pairs(case), model, seconds['packed_s']),
    'separate_tflops': tflops(separate_pairs(case), model, seconds['separate_s']),
    'gain': gain,
    'gain_to_ideal': gain * packed_pairs(case) / separate_pairs(case),
  }


def time_peers(case: Case, setting: Setting, repeats: int) -> dict[str, float | str]:
  """Seconds of forward and backward over separate rows in every peer, or why it does not run here."""
  q, k, v = _rows(setting.model, case.samples, case.prompt + case.suffix)
  found: dict[str, float | str] = {}
  for name in kernel_peers.PEERS:
    attend = kernel_peers.peer(name, jax.default_backend())
    if isinstance(attend, str):
      found[name] = attend
      continue
    step = jax.jit(functools.partial(kernel_peers.forward_and_backward, attend))
    try:
      found |= shortest_s({name: functools.partial(step, q, k, v)}, repeats)
    # A kernel may lack this device, these shapes or the memory for them.
    except (NotImplementedError, ValueError, RuntimeError) as error:
      found[name] = f'it failed: {str(error).splitlines()[0]}'
  return found


def time_decode(case: Case, setting: Setting, repeats: int) -> dict[str, float]:
  """Seconds of one step of attention in 8 layers: prompts shared by a group, read row by row, and copied to rows."""
  model = setting.model
  rng, page, layers, groups = np.random.default_rng(0), 128, 8, 4
  rows, per_prompt = groups * case.samples, -(-case.prompt // page)
  views = [
    PrefixView(pages=tuple(range(g * per_prompt, (g + 1) * per_prompt)), length=case.prompt)
    for g in range(groups)
    for _ in range(case.samples)
  ]
  pages, own = (groups * per_prompt, model.kv_heads, page), (rows, model.kv_heads, case.suffix)
  prefix = (
    _draw(rng, model.dtype, layers, *pages, model.width),
    _draw(rng, model.dtype, layers, *pages, model.width),
  )
  suffix = (
    _draw(rng, model.dtype, layers, *own, model.width),
    _draw(rng, model.dtype, layers, *own, model.width),
  )
  q = _draw(rng, model.dtype, rows, model.heads, model.width)

  @jax.jit
  def step(q, prefix, suffix, work):
    plan = plan_decode(
      work,
      jnp.full(rows, case.prompt, jnp.int32),
      jnp.full(rows, case.suffix, jnp.int32),
      jnp.arange(rows, dtype=jnp.int32)[:, None],
      suffix_page_size=case.suffix,
    )

    def layer(i, q):
      return shared_prefix_decode(q, prefix[0], prefix[1], suffix[0], suffix[1], plan, layer=i)

    return jax.lax.fori_loop(0, layers, layer, q)

  def reading(rows_per_block: int):
    work = make_work_list(
      views, page_size=page, rows_per_block=rows_per_block, max_items=rows * per_prompt
    )
    return functools.partial(step, q, prefix, suffix, jax.tree.map(jnp.asarray, work))

  whole = (layers, rows, model.kv_heads, case.prompt + case.suffix, model.width)
  copies = _draw(rng, model.dtype, *whole), _draw(rng, model.dtype, *whole)

  @jax.jit
  def copied(q, k, v):
    return jax.lax.fori_loop(0, layers, lambda i, q: kernel_peers.copied_decode(q, k, v, i), q)

  calls = {
    'shared_s': reading(case.samples),
    'row_by_row_s': reading(1),
    'copied_s': functools.partial(copied, q, *copies),
  }
  times = call_times(calls, repeats)
  token_bytes = 2 * layers * groups * model.kv_heads * model.width * q.dtype.itemsize
  return decode_figures(case, times, token_bytes)


def decode_figures(case: Case, times: dict[str, list[float]], token_bytes: int) -> dict[str, float]:
  """Shortest times, GB/s and gains; `token_bytes` are those of a token's keys and values in all layers and groups.

  The gain is the median over the turns, of the quicker form that does not share: a ratio of two shortest times says
  little on a machine that others use.
  """
  seconds = {name: min(found) for name, found in times.items()}
  unshared = ('row_by_row_s', 'copied_s')
  taken = rows_per_read(case.samples, case.prompt, 2 * case.suffix)  # the step's suffixes are whole

  def gain(form: str) -> float:
    return min(float(np.median(np.divide(times[name], times[form]))) for name in unshared)

  return seconds | {
    'shared_gb_s': token_bytes * case.packed / seconds['shared_s'] / 1e9,
    'unshared_gb_s': token_bytes * case.separate / min(seconds[name] for name in unshared) / 1e9,
    'promised_gain': case.separate / case.packed,
    'gain': gain('shared_s'),
    'rows_per_read': taken,
    'gain_as_chosen': gain('shared_s' if taken > 1 else 'row_by_row_s'),
  }


def _print_table(title: str, rows: dict[Case, dict[str, float]]) -> None:
  names = list(next(iter(rows.values())))
  print(f'\n{title}\n{"G":>4}{"P":>7}{"S":>6}' + ''.join(f'{name:>20}' for name in names))
  for case, values in rows.items():
    figures = ''.join(f'{values[name]:>20.4g}' for name in names)
    print(f'{case.samples:>4}{case.prompt:>7}{case.suffix:>6}{figures}')


def _print_peers(case: Case, setting: Setting, packed_s: float, peers: dict[str, float | str]):
  """A line for each peer: the gain of the packed form over it, or why it was skipped."""
  print(f'\nOver separate rows of others, G = {case.samples}, P = {case.prompt}, S = {case.suffix}')
  for name, seconds in peers.items():
    if isinstance(seconds, str):
      print(f'  {name:10s}skipped: {seconds}')
    else:
      speed = tflops(separate_pairs(case), setting.model, seconds)
      print(f'  {name:10s}{seconds:.4g} s  {speed:.4g} TFLOP/s  gain {seconds / packed_s:.2f}')


def main(argv: list[str]) -> None:
  """Prints the tables and, last, one line of JSON."""
  del argv
  repeats, device = _REPEATS.value, jax.devices()[0]
  setting = _ON_CPU if device.platform == 'cpu' else _ON_ACCELERATOR
  counted = {case: count_case(case, _BLOCK.value) for case in COUNTED}
  _print_table(f'Counted, blocks of {_BLOCK.value} tokens', counted)
  training = {case: time_training(case, setting, repeats) for case in setting.training}
  where = f'{device.device_kind}, {jnp.dtype(setting.model.dtype).name}'
  _print_table(f'Attention forward and backward, {where}', training)
  print('TFLOP/s: 3.5 * 4 * width * heads * pairs of tokens that are needed, over the time')
  peers = {case: time_peers(case, setting, repeats) for case in setting.training}
  for case, found in peers.items():
    _print_peers(case, setting, training[case]['packed_s'], found)
  decode = {case: time_decode(case, setting, repeats) for case in setting.decode}
  _print_table(f'Attention of a decode step, 4 groups, {where}', decode)
  print('GB/s: keys and values of P + G S tokens (shared) and of G (P + S), over the time')
  least = min(row['gain_as_chosen'] for row in decode.values())
  print(
    f'Least gain of a decode step, as the cost model chooses, over the quicker unshared one: {least:.2f}'
  )
  tables = {'counted': counted, 'training': training, 'peers': peers, 'decode': decode}
  plain = {
    name: {'x'.join(map(str, case)): values for case, values in rows.items()}
    for name, rows in tables.items()
  }
  print(json.dumps({'device': device.device_kind, 'least_decode_gain': least, 'tables': plain}))


if __name__ == '__main__':
  app.run(main)
