"""Requests that start, as the engine's arrays of one value per slot (numpy, on the host)."""

from collections.abc import Mapping

import numpy as np

from rlax_stack import rng
from rlax_stack.rollout.engine_state import EngineConfig, NewRows
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.sampler import RowSampling


def make_new_rows(
  engine: EngineConfig,
  starting: Mapping[int, tuple[GenerationRequest, int]],
  *,
  run_seed: int,
) -> NewRows:
  """Rows to start; slots that are not in `starting` are left alone by the engine.

  Args:
    engine: sizes of the arrays.
    starting: slot -> (request, row of prefix_logits that holds its prompt's last logits).
    run_seed: for requests without a seed of their own.
  """
  m = engine.slots
  sampling = RowSampling(
    temperature=np.zeros(m, np.float32),
    top_k=np.zeros(m, np.int32),
    top_p=np.ones(m, np.float32),
    min_p=np.zeros(m, np.float32),
  )
  new = NewRows(
    start=np.zeros(m, bool),
    entry=np.zeros(m, np.int32),
    prompt_length=np.ones(m, np.int32),
    max_tokens=np.ones(m, np.int32),
    sampling=sampling,
    key=np.zeros((m, 2), np.uint32),
    stop_ids=np.full((m, engine.max_stop_ids), -1, np.int32),
  )
  for slot, (request, entry) in starting.items():
    wish = request.sampling
    new.start[slot], new.entry[slot] = True, entry
    new.prompt_length[slot], new.max_tokens[slot] = len(request.prompt_tokens), wish.max_tokens
    sampling.temperature[slot], sampling.top_k[slot] = wish.temperature, wish.top_k
    sampling.top_p[slot], sampling.min_p[slot] = wish.top_p, wish.min_p
    seed = run_seed if wish.seed is None else wish.seed
    group = request.group_id if request.rng_group_id is None else request.rng_group_id
    new.key[slot] = rng.sample_key_data(seed, group, request.sample_index)
    new.stop_ids[slot, : len(wish.stop_token_ids)] = wish.stop_token_ids
  return new
