"""What the attention kernels visit and read, against what is needed, and what that is worth on this machine.

  python -m benchmarks.kernels

The first table is counted, not measured: for a group of G samples of S tokens after a prompt of P, the pairs of blocks
that tree attention visits against those that hold anything and against G separate sequences, and the bytes of keys and
values that a decode step reads against P + G S tokens and against G (P + S). The second is measured here: one attention
forward and backward over the packed group, the same rows with a dense mask, and G separate rows, in the form that this
device takes; the third a decode step with and without sharing. The gain over separate sequences is divided by the one
that the counts promise. The last line is JSON.
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

from rlax_stack.pallas_kernels import block_tables
from rlax_stack.pallas_kernels.decode_work import PrefixView, make_work_list
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
# Scaled down: the ratios of 4,096 + 1,024 with 8 samples, and of short prompts.
MEASURED = (Case(8, 1024, 256), Case(8, 128, 128))
DECODED = (Case(16, 2048, 64), Case(8, 64, 64))
_HEADS, _KV_HEADS, _WIDTH = 9, 3, 64  # SmolLM2-135M's


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
  pairs = case.prompt**2 / 2 + case.samples * case.suffix * (case.prompt + case.suffix / 2)
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
    'flops_to_ideal': visited * block * block / pairs,
    'token_gain': case.separate / case.packed,
    'decode_tokens_read': read,
    'decode_to_ideal': read / case.packed,
    'decode_gain': case.separate / read,
  }


def shortest_s(call: Callable[[], Any], repeats: int) -> float:
  """Shortest time of a call, after one that compiles."""
  jax.block_until_ready(call())
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(call())
    times.append(time.perf_counter() - start)
  return min(times)


def _draw(rng: np.random.Generator, *shape: int) -> jax.Array:
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@functools.partial(jax.jit, static_argnames='implementation')
def _step(q, k, v, positions, ends, implementation):
  """Output and gradients, the output standing for its own cotangent."""

  def attend(q, k, v):
    return tree_attention(q, k, v, positions, ends, implementation=implementation)

  out, pull = jax.vjp(attend, q, k, v)
  return out, pull(out)


def time_training(case: Case, repeats: int) -> dict[str, float]:
  """Seconds of forward and backward: packed, with a dense mask, and separate."""
  rng = np.random.default_rng(0)

  def run(rows: int, tokens: int, tree: tuple[np.ndarray, np.ndarray], implementation: str):
    q = _draw(rng, rows, tokens, _HEADS, _WIDTH)
    k, v = (_draw(rng, rows, tokens, _KV_HEADS, _WIDTH) for _ in range(2))
    positions, ends = (jnp.broadcast_to(jnp.asarray(x)[None], (rows, tokens)) for x in tree)
    call = functools.partial(_step, q, k, v, positions, ends, implementation)
    return shortest_s(call, repeats)

  length = case.prompt + case.suffix
  causal = np.arange(length, dtype=np.int32), np.full(length, length, np.int32)
  seconds = {
    'packed_s': run(1, case.packed, layout(case, case.packed), 'auto'),
    'dense_s': run(1, case.packed, layout(case, case.packed), 'reference'),
    'separate_s': run(case.samples, length, causal, 'auto'),
  }
  pairs = case.prompt**2 + case.samples * case.suffix * (2 * case.prompt + case.suffix)
  ideal = case.samples * length**2 / pairs
  gain = seconds['separate_s'] / seconds['packed_s']
  return seconds | {
    'gain': gain,
    'gain_to_ideal': gain / ideal,
    'over_dense': seconds['dense_s'] / seconds['packed_s'],
  }


def time_decode(case: Case, repeats: int) -> dict[str, float]:
  """Seconds of one step of attention in 8 layers: prompts shared by a group, and read row by row."""
  rng, page, layers, groups = np.random.default_rng(0), 128, 8, 4
  rows, per_prompt = groups * case.samples, -(-case.prompt // page)
  views = [
    PrefixView(pages=tuple(range(g * per_prompt, (g + 1) * per_prompt)), length=case.prompt)
    for g in range(groups)
    for _ in range(case.samples)
  ]
  pages, own = (groups * per_prompt, _KV_HEADS, page), (rows, _KV_HEADS, case.suffix)
  prefix = _draw(rng, layers, *pages, _WIDTH), _draw(rng, layers, *pages, _WIDTH)
  suffix = _draw(rng, layers, *own, _WIDTH), _draw(rng, layers, *own, _WIDTH)
  q = _draw(rng, rows, _HEADS, _WIDTH)

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

  def run(rows_per_block: int) -> float:
    work = make_work_list(
      views, page_size=page, rows_per_block=rows_per_block, max_items=rows * per_prompt
    )
    work = jax.tree.map(jnp.asarray, work)
    return shortest_s(lambda: step(q, prefix, suffix, work), repeats)

  shared, alone = run(case.samples), run(1)
  return {'shared_s': shared, 'unshared_s': alone, 'gain': alone / shared}


def _print_table(title: str, rows: dict[Case, dict[str, float]]) -> None:
  names = list(next(iter(rows.values())))
  print(f'\n{title}\n{"G":>4}{"P":>7}{"S":>6}' + ''.join(f'{name:>20}' for name in names))
  for case, values in rows.items():
    figures = ''.join(f'{values[name]:>20.4g}' for name in names)
    print(f'{case.samples:>4}{case.prompt:>7}{case.suffix:>6}{figures}')


def main(argv: list[str]) -> None:
  """Prints the tables and, last, one line of JSON."""
  del argv
  repeats = _REPEATS.value
  tables = {
    'counted': {case: count_case(case, _BLOCK.value) for case in COUNTED},
    'training': {case: time_training(case, repeats) for case in MEASURED},
    'decode': {case: time_decode(case, repeats) for case in DECODED},
  }
  device = jax.devices()[0]
  _print_table(f'Counted, blocks of {_BLOCK.value} tokens', tables['counted'])
  _print_table(f'Attention forward and backward, {device.device_kind}, float32', tables['training'])
  _print_table(f'Attention of a decode step, 4 groups, {device.device_kind}', tables['decode'])
  plain = {
    name: {'x'.join(map(str, case)): values for case, values in rows.items()}
    for name, rows in tables.items()
  }
  print(json.dumps({'device': device.device_kind, 'tables': plain}))


if __name__ == '__main__':
  app.run(main)
