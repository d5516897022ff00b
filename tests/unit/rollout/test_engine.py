"""The engine's own calls: one prefix for many rows, early exit, release, and no compilation after the warm-up."""

import dataclasses

import jax
import numpy as np
import pytest

from rlax_stack import rng
from rlax_stack.compile_counter import CompileCounter
from rlax_stack.pallas_kernels.decode_work import PrefixView, make_work_list
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import LENGTH, RUNNING, NewRows
from rlax_stack.rollout.sampler import RowSampling

_VIEW = PrefixView(pages=(2, 0), length=20)


def _new_rows(tiny, max_tokens):
  """Greedy rows on entry 1 for the slots with max_tokens > 0."""
  m = tiny.SIZES.slots
  max_tokens = np.asarray(max_tokens, np.int32)
  keys = np.stack([rng.sample_key_data(0, 0, i) for i in range(m)])
  zeros = np.zeros(m, np.float32)
  return NewRows(
    start=max_tokens > 0,
    entry=np.full(m, 1, np.int32),
    prefix_length=np.full(m, _VIEW.length, np.int32),
    max_tokens=max_tokens,
    forced=np.full(m, -1, np.int32),
    sampling=RowSampling(zeros, np.zeros(m, np.int32), zeros + 1, zeros),
    key=keys,
    stop_ids=np.full((m, tiny.SIZES.max_stop_ids), -1, np.int32),
    top_log_probs=np.zeros(m, np.int32),
  )


def _free(tiny):
  """Pages of all rows, one row's after another's, and no token forced."""
  sizes = tiny.SIZES
  pages = np.arange(sizes.suffix_pages, dtype=np.int32).reshape(sizes.slots, -1)
  return pages, np.full((sizes.chunk_steps, sizes.slots), -1, np.int32)


def _started(tiny, max_tokens):
  """Engine, weights, state with the rows started, their first tokens and the work list."""
  engine = tiny.engine()
  params = engine.load_params(tiny.params())
  prompt = np.zeros((1, 32), np.int32)
  prompt[0, : _VIEW.length] = tiny.prompt(0, _VIEW.length)
  prefix = engine.prefill(
    params=params, padded_tokens=prompt, true_length=np.array([_VIEW.length], np.int32)
  )
  state = engine.insert(
    prefix, engine.init_decode_state(), np.array([_VIEW.pages], np.int32), np.array([1], np.int32)
  )
  state, first = engine.bulk_insert(state, _new_rows(tiny, max_tokens), 7)
  sizes = tiny.SIZES
  work = make_work_list(
    [_VIEW if n > 0 else None for n in max_tokens],
    page_size=sizes.page_size,
    rows_per_block=sizes.rows_per_block,
    max_items=sizes.max_items,
  )
  return engine, params, state, first, work


def test_rows_share_one_prefix_and_get_the_same_greedy_tokens(tiny):
  engine, params, state, first, work = _started(tiny, [5, 5, 0, 5, 0, 0, 0, 5])
  state, rest = engine.generate(params, state, work, *_free(tiny), version=7, steps=4)
  live = [0, 1, 3, 7]
  tokens = np.concatenate([first.tokens, np.asarray(rest.tokens)[:4]])[:, live]
  assert (tokens == tokens[:, :1]).all()
  whole = np.concatenate([tiny.prompt(0, _VIEW.length), tokens[:-1, 0]])
  want = tiny.full_logits(whole)[_VIEW.length - 1 :].argmax(-1)
  np.testing.assert_array_equal(tokens[:, 0], want)
  np.testing.assert_array_equal(np.asarray(rest.valid)[:4].sum(1), [4] * 4)
  np.testing.assert_array_equal(np.asarray(rest.finish)[live], [LENGTH] * 4)
  assert (np.asarray(rest.versions) == 7).all()


def test_generate_ends_early(tiny):
  engine, params, state, first, work = _started(tiny, [2, 3, 6, 6, 0, 0, 0, 0])
  assert np.asarray(first.finish)[0] == RUNNING
  state, one = engine.generate(params, state, work, *_free(tiny), version=0, steps=6, stop_after=1)
  assert int(one.steps) == 1  # row 0 finished
  state, two = engine.generate(params, state, work, *_free(tiny), version=0, steps=1)
  assert int(two.steps) == 1  # as many as asked for
  state, rest = engine.generate(params, state, work, *_free(tiny), version=0, steps=6)
  assert int(rest.steps) == 3  # rows 2 and 3 finished: nobody is left
  state, none = engine.generate(params, state, work, *_free(tiny), version=0, steps=6)
  assert int(none.steps) == 0
  assert not np.asarray(none.valid).any()


def test_released_row_is_no_longer_decoded(tiny):
  engine, params, state, _, work = _started(tiny, [6, 6, 0, 0, 0, 0, 0, 0])
  state = engine.free_resource(0, state)
  _, result = engine.generate(params, state, work, *_free(tiny), version=0, steps=3)
  np.testing.assert_array_equal(np.asarray(result.valid)[:3].sum(0)[:2], [0, 3])


def test_weights_sharded_by_a_learner_are_gathered_to_one_device(tiny):
  mesh = jax.make_mesh((2,), ('fsdp',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))
  params = jax.tree.map(
    lambda x: jax.device_put(x, sharding) if x.shape[0] % 2 == 0 else x, tiny.params()
  )
  served = tiny.engine().load_params(params)
  assert {len(x.devices()) for x in jax.tree.leaves(served)} == {1}
  np.testing.assert_array_equal(
    served.kernels[1]['o'], tiny.params()['layers']['o_proj']['kernel'][1]
  )


def test_sizes_are_told(tiny):
  engine = tiny.engine()
  assert (engine.max_concurrent_decodes, engine.max_prefill_length) == (8, 32)


def test_nothing_compiles_after_warm_up(tiny):
  engine = Engine(tiny.MODEL, tiny.SIZES)
  scheduler = tiny.scheduler(of=lambda: engine, decode_text=str)
  scheduler.warm_up()
  scheduler.swap_params(tiny.params(1), 1)
  newest = tiny.params(2)
  with CompileCounter() as counter:
    requests = [
      tiny.request(g, i, temperature=0.5 * i, top_k=3 * (i % 2), stop_strings=('[7',) * (i % 2))
      for g in range(7)
      for i in range(4)
    ]
    scheduler.generate_all(requests)
    scheduler.swap_params(newest, 2)
    scheduler.submit(tiny.request(50, 0))
    scheduler.step()
    scheduler.cancel(50)
    scheduler.generate_all(requests[:3])
    assert counter.count.names == ()


def test_kernels_that_are_absent_are_refused(tiny):
  _, params, state, _, work = _started(tiny, [3, 0, 0, 0, 0, 0, 0, 0])
  engine = Engine(tiny.MODEL, dataclasses.replace(tiny.SIZES, kernels='pallas'))
  with pytest.raises(ValueError, match="'pallas' of shared-prefix decode is absent: it is for TPU"):
    engine.generate(params, state, work, *_free(tiny), version=0, steps=1)
