"""Qwen3-32B on 1,024 v5p chips, rows of 32k tokens: the machine and the size of model of RLAX.

    python -m rlax_stack.plan --config=configs/clusters/qwen3_32b_v5p_1024.py

For training set config.model.path to the model's folder.
"""

from configs import base


def get_config():
  """The base config for this machine."""
  config = base.get_config()
  config.name = 'qwen3_32b_v5p_1024'
  config.model.path = 'shape:qwen3_32b'
  config.plan.topology = 'v5p:8x8x16'
  config.learner.mesh.fsdp = 512
  config.learner.mesh.tensor = 2
  config.learner.remat = 'layer'
  config.learner.row_length = 32768
  config.learner.micro_batch_tokens = 32768
  config.rollout.groups_per_step = 64
  config.rollout.group_size = 16
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_tokens = 31744
  config.rollout.slots = 32
  config.rollout.kv = 'int8'  # a worker is one chip
  config.rollout.kv_fraction = 0.12
  config.fleet.max_staleness = 4
  return config
