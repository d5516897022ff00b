"""Qwen3-8B on a node of eight H100, rows of 8k tokens. Compiled for virtual CPU devices, and marked so.

    python -m rlax_stack.plan --config=configs/clusters/qwen3_8b_h100_8.py

For training set config.model.path to the model's folder.
"""

from configs import base


def get_config():
  """The base config for this machine."""
  config = base.get_config()
  config.name = 'qwen3_8b_h100_8'
  config.model.path = 'shape:qwen3_8b'
  config.plan.topology = 'h100:8'
  config.learner.mesh.fsdp = 8
  config.learner.remat = 'layer'
  config.learner.row_length = 8192
  config.learner.micro_batch_tokens = 8192
  config.rollout.groups_per_step = 32
  config.rollout.group_size = 8
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_tokens = 7168
  config.rollout.slots = 32
  config.fleet.max_staleness = 2
  return config
