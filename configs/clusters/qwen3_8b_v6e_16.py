"""Qwen3-8B on 16 v6e chips, rows of 8k tokens.

    python -m rlax_stack.plan --config=configs/clusters/qwen3_8b_v6e_16.py

For training set config.model.path to the model's folder.
"""

from configs import base


def get_config():
  """The base config for this machine."""
  config = base.get_config()
  config.name = 'qwen3_8b_v6e_16'
  config.model.path = 'shape:qwen3_8b'
  config.plan.topology = 'v6e:4x4'
  config.learner.mesh.fsdp = 16
  config.learner.remat = 'layer'
  config.learner.row_length = 8192
  config.learner.micro_batch_tokens = 8192
  config.rollout.groups_per_step = 32
  config.rollout.group_size = 8
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_tokens = 7168
  config.rollout.slots = 32
  config.rollout.kv_fraction = 0.2
  config.fleet.max_staleness = 2
  return config
