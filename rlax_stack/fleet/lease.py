"""What the coordinator tells a worker: a lease, or why there is none. Plain data, ready to go over a wire."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlax_stack.errors import CheckpointError
from rlax_stack.types import Message, Past, Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lease:
  """The right of one worker to roll out one group.

  Every sample `0 <= i < num_samples` uses the randomness of (run seed, group_id, i), whatever the attempt: a group that
  is leased again gives the same samples under the same weights. With `greedy` the last of them, `group_size`, is drawn
  at temperature 0. The worker starts with weights of at least
  `min_version`; a group that comes back while the learner is past `last_version` may be dropped.
  """

  group_id: int
  prompt: Prompt
  group_size: int
  greedy: bool
  attempt: int  # 0 the first time
  token: str  # fencing token: only the newest lease of a group may deliver
  worker_id: str
  deadline_s: float  # on the coordinator's clock; `Coordinator.extend` moves it
  min_version: int
  last_version: int
  past: Past = Past()  # of the prompt, when the lease was granted

  @property
  def num_samples(self) -> int:
    """Samples to deliver: those to train on and the greedy one."""
    return self.group_size + self.greedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
  """No work now; ask again."""

  reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
  """No work ever again; the worker may end."""

  reason: str


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
  """JSON value of a prompt."""
  return {
    'prompt_id': prompt.prompt_id,
    'messages': [[message.role, message.content] for message in prompt.messages],
    'answer': prompt.answer,
    'metadata': dict(prompt.metadata),
  }


def prompt_from_json(value: Mapping[str, Any]) -> Prompt:
  """Inverse of `prompt_to_json`; CheckpointError where the value is malformed."""
  try:
    messages = tuple(Message(role=role, content=content) for role, content in value['messages'])
    return Prompt(
      prompt_id=value['prompt_id'],
      messages=messages,
      answer=value['answer'],
      metadata=dict(value['metadata']),
    )
  except (KeyError, TypeError, ValueError) as error:
    raise CheckpointError(
      f'A prompt in the checkpoint is malformed ({error!r}). Use an older one.'
    ) from error
