"""A 135M-parameter language model learns one-digit arithmetic on a laptop CPU.

python -m rlax_stack.launch --config=configs/quickstart.py
"""

from ml_collections import ConfigDict

from configs import base

# The whole prompt has 32 tokens with it, and the model is less wordy than with its own default.
SYSTEM_PROMPT = 'Answer:'


def get_config():
  """SmolLM2-135M-Instruct, full fine-tuning with GRPO on reasoning-gym's chain_sum, two terms."""
  config = base.get_config()
  config.name = 'quickstart'
  config.steps = 40
  options = ConfigDict({'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1})
  shared = {'task': 'chain_sum', 'task_options': options, 'system_prompt': SYSTEM_PROMPT}
  config.data.train = base.source(size=2000, **shared)
  config.data.eval = base.source(size=64, seed=1, **shared)
  config.rollout.max_prompt_tokens = 32
  config.rollout.max_tokens = 8
  config.learner.learning_rate = 1e-5
  config.learner.row_length = 192  # two groups of long answers, four of short ones
  config.learner.micro_batch_tokens = 384
  config.checkpoint.every_steps = 20
  config.eval.every_steps = 20
  config.eval.samples = 4
  return config
