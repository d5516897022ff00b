"""A 135M-parameter language model learns one-digit arithmetic on a laptop CPU.

python -m rlax_stack.launch --config=configs/quickstart.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config():
  """SmolLM2-135M-Instruct, full fine-tuning with GRPO on chain_sum."""
  config = base.get_config()
  config.name = 'quickstart'
  options = ConfigDict({'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1})
  config.data.train = base.source(size=2000, task_options=options)
  config.data.eval = base.source(size=64, seed=1, task_options=options)
  config.rollout.max_prompt_tokens = 64
  config.rollout.max_tokens = 16
  config.learner.learning_rate = 1e-5
  return config
