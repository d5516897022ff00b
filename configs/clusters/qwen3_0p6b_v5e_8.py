"""Qwen3-0.6B on eight v5e chips: the smallest slice that is worth its name.

    python -m rlax_stack.plan --config=configs/clusters/qwen3_0p6b_v5e_8.py

For training set config.model.path to the model's folder.
"""

from configs import base


def get_config():
  """The base config for this machine."""
  config = base.get_config()
  config.name = 'qwen3_0p6b_v5e_8'
  config.model.path = 'shape:qwen3_0p6b'
  config.plan.topology = 'v5e:2x4'
  config.learner.mesh.fsdp = 8
  config.learner.remat = 'layer'
  config.learner.row_length = 8192
  config.learner.micro_batch_tokens = 8192
  config.rollout.groups_per_step = 32
  config.rollout.group_size = 8
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_tokens = 3072
  config.rollout.slots = 64
  config.rollout.kv_fraction = 0.4
  config.fleet.max_staleness = 1
  return config
