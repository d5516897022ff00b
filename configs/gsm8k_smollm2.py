"""SmolLM2-135M-Instruct on GSM8K, from a folder that holds train.jsonl and test.jsonl.

    python -m rlax_stack.launch --config=configs/gsm8k_smollm2.py \\
        --config.data.train.path=gsm8k --config.data.eval.path=gsm8k

The model is small for the task: rewards are sparse, and a run takes hours on two cores.
"""

from configs import base

SYSTEM_PROMPT = 'Solve the problem step by step. End with the answer alone after ####.'


def get_config():
  """GRPO with the number after #### as the only reward."""
  config = base.get_config()
  config.name = 'gsm8k_smollm2'
  config.steps = 500
  config.data.train = base.source(
    kind='gsm8k', path='gsm8k', split='train', size=0, system_prompt=SYSTEM_PROMPT
  )
  config.data.eval = base.source(
    kind='gsm8k', path='gsm8k', split='test', size=64, system_prompt=SYSTEM_PROMPT
  )
  config.rollout.max_prompt_tokens = 256
  config.rollout.max_tokens = 256
  config.learner.learning_rate = 5e-6
  config.learner.warmup_steps = 10
  config.eval.every_steps = 50
  return config
