"""Qwen3-8B on 64 v5e chips, rows of 8k tokens.

    python -m rlax_stack.plan --config=configs/clusters/qwen3_8b_v5e_64.py

For training set config.model.path to the model's folder.
"""

from configs import base


def get_config():
  """The base config for this machine."""
  config = base.get_config()
  config.name = 'qwen3_8b_v5e_64'
  config.model.path = 'shape:qwen3_8b'
  config.plan.topology = 'v5e:8x8'
  config.learner.mesh.fsdp = 64
  config.learner.remat = 'layer'
  config.learner.row_length = 8192
  config.learner.micro_batch_tokens = 8192
  config.rollout.groups_per_step = 64
  config.rollout.group_size = 8
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_tokens = 7168
  config.rollout.slots = 16
  config.rollout.weights = 'int8'  # a worker is one chip
  config.rollout.kv = 'int8'
  config.rollout.kv_fraction = 0.25
  config.fleet.max_staleness = 2
  return config
