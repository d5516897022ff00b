"""Static row shapes: by hand, and that no batch within the limits outgrows them."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rlax_stack.errors import ConfigError
from rlax_stack.learner.packing import RowShape, pack_groups
from rlax_stack.learner.row_plan import RowPlan, plan_rows, row_length_problem
from rlax_stack.types import FinishReason, Group, Prompt, Trajectory


def test_plans_by_hand():
  plan = plan_rows(groups_per_batch=8, group_size=8, max_prompt_tokens=64, max_tokens=64)
  assert plan == RowPlan(shape=RowShape(576, 512), micro_batch_rows=1, max_micro_batches=8)
  plan = plan_rows(
    groups_per_batch=8,
    group_size=8,
    max_prompt_tokens=64,
    max_tokens=64,
    micro_batch_tokens=1200,
    data_parallel=2,
  )
  assert (plan.micro_batch_rows, plan.max_micro_batches) == (4, 2)
  # Eight completions of 1,024 tokens: two fit beside a prompt of 2 in 2,048.
  plan = plan_rows(groups_per_batch=3, group_size=8, max_prompt_tokens=2, max_tokens=1024)
  assert plan == RowPlan(shape=RowShape(2048, 2048), micro_batch_rows=1, max_micro_batches=12)
  # One trajectory longer than that is the row.
  plan = plan_rows(groups_per_batch=1, group_size=2, max_prompt_tokens=1, max_tokens=4096)
  assert plan.shape == RowShape(4096, 4096)


def test_rows_over_several_devices_are_whole_blocks_on_each():
  sizes = {'groups_per_batch': 3, 'group_size': 3, 'max_prompt_tokens': 64, 'max_tokens': 63}
  plan = plan_rows(**sizes, context=4, micro_batch_tokens=500, data_parallel=2)
  # 64 + 3 x 62 tokens become 4 blocks of 64, 3 x 63 targets 4 x 48; 500 tokens on each of 4 devices make 7 such rows.
  assert plan == RowPlan(shape=RowShape(256, 192), micro_batch_rows=14, max_micro_batches=1)
  assert plan_rows(**sizes, context=4, row_length=512).shape.length == 512
  with pytest.raises(ConfigError, match='row_length=384 .*context=4 .*64 x 4 = 256. Set it to 512'):
    plan_rows(**sizes, context=4, row_length=384)
  assert row_length_problem(384, 1) == row_length_problem(0, 4) == ''


def test_row_length_too_short():
  with pytest.raises(ConfigError, match='row_length 100 cannot hold.*127 at least'):
    plan_rows(groups_per_batch=1, group_size=2, max_prompt_tokens=64, max_tokens=64, row_length=100)


def _group(group_id, prompt_length, lengths):
  trajectories = []
  for i, length in enumerate(lengths):
    size = prompt_length + length
    trajectories.append(
      Trajectory(
        group_id=group_id,
        sample_index=i,
        prompt_id='p',
        tokens=np.ones(size, np.int32),
        source_t=np.ones(size, np.int8),
        mask_t=np.arange(size) >= prompt_length,
        behaviour_log_probs_t=np.zeros(size, np.float32),
        raw_log_probs_t=np.zeros(size, np.float32),
        version_t=np.zeros(size, np.int32),
        finish_reason=FinishReason.LENGTH,
      )
    )
  return Group(
    group_id=group_id,
    prompt=Prompt(prompt_id='p', messages=(), answer=''),
    prompt_tokens=np.ones(prompt_length, np.int32),
    trajectories=tuple(trajectories),
  )


@hypothesis.given(st.data())
def test_every_batch_within_the_limits_fits(data):
  limits = {
    'groups_per_batch': data.draw(st.integers(1, 4)),
    'group_size': data.draw(st.integers(1, 5)),
    'max_prompt_tokens': data.draw(st.integers(1, 40)),
    'max_tokens': data.draw(st.integers(1, 40)),
  }
  bootstrap = data.draw(st.booleans())
  single = limits['max_prompt_tokens'] + limits['max_tokens'] - 1 + bootstrap
  plan = plan_rows(
    **limits,
    bootstrap=bootstrap,
    row_length=data.draw(st.sampled_from([0, single, single + 30])),
    micro_batch_tokens=data.draw(st.integers(1, 300)),
    data_parallel=data.draw(st.integers(1, 3)),
  )
  groups = [
    _group(
      g,
      data.draw(st.integers(1, limits['max_prompt_tokens'])),
      data.draw(
        st.lists(st.integers(1, limits['max_tokens']), min_size=1, max_size=limits['group_size'])
      ),
    )
    for g in range(limits['groups_per_batch'])
  ]
  batch = pack_groups(
    groups,
    [np.zeros(len(g.trajectories)) for g in groups],
    row_shapes=[plan.shape],
    rows_multiple=plan.micro_batch_rows,
    bootstrap=bootstrap,
  )
  assert batch.tokens.shape[0] <= plan.max_micro_batches * plan.micro_batch_rows
