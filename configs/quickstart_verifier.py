"""The quickstart's model learns one-digit arithmetic and, with weights of its own, to say whether an answer is correct.

python -m rlax_stack.launch --config=configs/quickstart_verifier.py
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config():
  """As quickstart, with a verifier that is trained beside the solver; docs/roles.md."""
  config = quickstart.get_config()
  config.name = 'quickstart_verifier'
  config.roles.kind = 'verifier'
  config.roles.policy = 'verifier'
  config.roles.answers = 2
  config.roles.verdicts = 8
  config.roles.max_tokens = 4
  config.roles.max_prompt_tokens = 96
  config.roles.words = ('yes', 'no')
  config.roles.template = '{question} {answer}\nIs this correct? Say yes or no.'
  config.policies.verifier = ConfigDict({'learner': ConfigDict({'learning_rate': 1e-5})})
  return config
