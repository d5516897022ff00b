"""Llama-3-70B on 256 v6e chips, rows of 8k tokens.

    python -m rlax_stack.plan --config=configs/clusters/llama3_70b_v6e_256.py

The learner alone: a rollout worker is one device today, and none of these holds 70B weights.
"""

from configs import base


def get_config():
  """The base config for this machine."""
  config = base.get_config()
  config.name = 'llama3_70b_v6e_256'
  config.model.path = 'shape:llama3_70b'
  config.plan.topology = 'v6e:16x16'
  config.learner.mesh.fsdp = 64
  config.learner.mesh.tensor = 4
  config.learner.remat = 'layer'
  config.learner.row_length = 8192
  config.learner.micro_batch_tokens = 8192
  config.rollout.groups_per_step = 64
  config.rollout.group_size = 16
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_tokens = 7168
  config.rollout.slots = 16
  config.fleet.max_staleness = 4
  return config
