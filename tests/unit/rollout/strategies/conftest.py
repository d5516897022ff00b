"""Tasks and a driver for the tests of strategies."""

import numpy as np
import pytest

from rlax_stack.rollout.strategies.plan import Task, carry_out
from rlax_stack.types import Message, Past, Prompt, SamplingParams


class Words:
  """Token i is the word `i`; every seventh token ends a line instead."""

  def encode(self, text):
    return np.array([int(word) for word in text.split()], np.int32)

  def decode(self, ids):
    return ''.join('\n' if i % 7 == 0 else f'{i} ' for i in ids)


def _task(
  tiny,
  *,
  group=3,
  size=4,
  greedy=False,
  metadata=None,
  answer='',
  version=0,
  tokens=None,
  past=None,
  **sampling,
):
  params = SamplingParams(**{'max_tokens': 12, **sampling})
  greedy_params = SamplingParams(**{'max_tokens': 12, **sampling, 'temperature': 0.0})
  return Task(
    group_id=group,
    prompt=Prompt(
      prompt_id=f'p{group}',
      messages=(Message(role='user', content='?'),),
      answer=answer,
      metadata=metadata or {},
    ),
    prompt_tokens=tiny.prompt(group, 6) if tokens is None else tokens,
    samplings=(params,) * size + (greedy_params,) * greedy,
    group_size=size,
    version=version,
    tokenizer=Words(),
    past=past or Past(),
  )


@pytest.fixture(scope='session')
def make_task(tiny):
  """Function (group, size, greedy, metadata, answer, version, tokens, past, sampling fields) -> Task."""
  return lambda **fields: _task(tiny, **fields)


@pytest.fixture(scope='session')
def draw(tiny):
  """Function (strategy, task, scheduler) -> the trajectories of the task, by sample."""

  def run(strategy, task, scheduler=None):
    made = tiny.scheduler() if scheduler is None else scheduler
    return carry_out([strategy.plan(task)], made.generate_all)

  return run
