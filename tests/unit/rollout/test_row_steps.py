"""Rows between the logits: what a token does to them, and how they start."""

import jax.numpy as jnp
import numpy as np

from rlax_stack.rollout.engine_state import (
  LENGTH,
  RUNNING,
  STOPPED,
  empty_result,
  empty_rows,
)
from rlax_stack.rollout.new_rows import make_new_rows
from rlax_stack.rollout.row_steps import accept, draw, goes_on, start_rows


def test_a_token_ends_a_row_or_moves_it_on(tiny):
  rows = empty_rows(tiny.SIZES, 97)
  rows = rows._replace(
    active=jnp.asarray([True] * 3 + [False] * 5),
    position=jnp.full(8, 10, jnp.int32),
    count=jnp.full(8, 2, jnp.int32),
    max_tokens=jnp.asarray([9, 9, 3, 9, 9, 9, 9, 9], jnp.int32),
    stop_ids=rows.stop_ids.at[:, 3].set(40),
  )
  after = accept(rows, jnp.asarray([7, 40, 7, 7, 7, 7, 7, 7], jnp.int32), rows.active)
  np.testing.assert_array_equal(after.finish[:3], [RUNNING, STOPPED, LENGTH])
  np.testing.assert_array_equal(after.active, [True] + [False] * 7)
  np.testing.assert_array_equal(after.position, [11] * 3 + [10] * 5)
  np.testing.assert_array_equal(after.count, [3] * 3 + [2] * 5)
  np.testing.assert_array_equal(after.token, [7, 40, 7] + [0] * 5)


def test_a_known_token_is_taken_and_an_unknown_one_drawn(tiny):
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(97, 8)), jnp.float32)
  rows = empty_rows(tiny.SIZES, 97)  # temperature 0
  forced = jnp.asarray([5, -1] * 4, jnp.int32)
  drawn, token = draw(logits, rows, jnp.zeros(8, jnp.int32), forced)
  np.testing.assert_array_equal(drawn.token, np.argmax(logits, axis=0))
  np.testing.assert_array_equal(token, np.where(forced >= 0, 5, np.argmax(logits, axis=0)))


def test_a_call_ends_with_its_steps_its_rows_or_enough_that_finished(tiny):
  rows = empty_rows(tiny.SIZES, 97)
  result = empty_result(tiny.MODEL, tiny.SIZES, (6, 8), rows.finish, jnp.int32(0))

  def goes(running, done, stop_after):
    active = jnp.arange(8) < running
    at = result._replace(steps=jnp.int32(done))
    numbers = (jnp.int32(4), jnp.int32(6), jnp.int32(stop_after))  # of 4 rows, 6 steps at most
    return bool(goes_on(rows._replace(active=active), at, *numbers))

  assert goes(4, 5, 0) and not goes(4, 6, 0)
  assert goes(1, 0, 0) and not goes(0, 0, 0)
  assert goes(3, 0, 2) and not goes(2, 0, 2)


def test_only_chosen_slots_start(tiny):
  new = make_new_rows(tiny.SIZES, {}, run_seed=0)
  new.start[2], new.entry[2], new.prefix_length[2], new.max_tokens[2] = True, 1, 9, 4
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(8, 97)), jnp.float32)
  rows, result = start_rows(tiny.SIZES, logits, empty_rows(tiny.SIZES, 97), new, np.int32(3))
  np.testing.assert_array_equal(np.flatnonzero(rows.active), [2])
  assert (int(rows.position[2]), int(rows.count[2])) == (9, 1)
  assert int(result.tokens[0, 2]) == int(np.argmax(logits[1]))
  np.testing.assert_array_equal(result.valid[0], np.arange(8) == 2)
