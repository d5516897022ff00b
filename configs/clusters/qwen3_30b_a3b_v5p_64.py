"""Qwen3-30B-A3B on 64 v5p chips: memory is plenty, so that nothing is computed twice along an axis of experts.

    python -m rlax_stack.plan --config=configs/clusters/qwen3_30b_a3b_v5p_64.py

For training set config.model.path to the model's folder.
"""

from configs import base


def get_config():
  """The base config for this machine."""
  config = base.get_config()
  config.name = 'qwen3_30b_a3b_v5p_64'
  config.model.path = 'shape:qwen3_30b_a3b'
  config.plan.topology = 'v5p:4x4x4'
  config.learner.mesh.fsdp = 64
  config.learner.remat = 'layer'
  config.learner.row_length = 8192
  config.learner.micro_batch_tokens = 8192
  config.learner.router_aux_coef = 0.001
  config.rollout.router_replay = True
  config.rollout.groups_per_step = 64
  config.rollout.group_size = 8
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_tokens = 3072
  config.rollout.slots = 64
  config.fleet.max_staleness = 1
  return config
