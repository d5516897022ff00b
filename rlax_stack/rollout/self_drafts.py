"""A quantised copy of the weights says what a row's next tokens will be (inside jit).

The copy decodes a few tokens ahead, in the row's own column, with the row's sampling parameters and the randomness of
each position: where its distribution is close to the policy's, the same random numbers give the same token. Its keys
and values stand in the row's pages only until the columns that check its tokens write theirs, in the same step.

Not for checking (speculation.py), nor for when to draft (decode_batch.py). The drafter is the policy itself, made
smaller at each swap, as in EfficientRollout: it needs no training and never grows old.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlax_stack import rng
from rlax_stack.rollout.engine_state import DecodeState
from rlax_stack.rollout.sampler import sample

# state -> logits [V, M], the suffix KV and experts
Decode = Callable[[DecodeState], tuple[jax.Array, Any, Any, Any]]


def draft_ahead(
  decode: Decode, state: DecodeState, known: jax.Array, columns_of_row: jax.Array, depth: jax.Array
) -> tuple[jax.Array, Any, Any]:
  """Proposals for the next tokens of every row.

  Args:
    decode: one decode step of the copy.
    state: its rows stand in their own columns.
    known: int32 [W - 1, M], proposals that are there already, -1 where there is none; they are followed.
    columns_of_row: int32 [M, W], see `speculation.Columns`; a row without a column for a token needs none after it.
    depth: int32 [], tokens to draft, at most W - 1.

  Returns:
    `known` with drafted tokens where it had none, and the suffix KV, in which what was drafted is to be overwritten.
  """
  slots = known.shape[1]

  def ahead(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    token, proposals, suffix_k, suffix_v = carry
    rows = state.rows
    count = rows.count + i
    checked = columns_of_row[:, 1:].T[i] < slots
    rows = rows._replace(
      token=token,
      position=rows.position + i,
      count=count,
      active=rows.active & checked & (count < rows.max_tokens) & (token >= 0),
    )
    logits, suffix_k, suffix_v, _ = decode(
      state._replace(rows=rows, suffix_k=suffix_k, suffix_v=suffix_v)
    )
    drawn = sample(logits, rng.token_uniforms(rows.key, rows.position + 1), rows.sampling).token
    drawn = jnp.where(known[i] >= 0, known[i], jnp.where(rows.active, drawn, -1))
    return drawn, proposals.at[i].set(drawn), suffix_k, suffix_v

  carry = (state.rows.token, known, state.suffix_k, state.suffix_v)
  _, proposals, suffix_k, suffix_v = jax.lax.fori_loop(0, depth, ahead, carry)
  return proposals, suffix_k, suffix_v
