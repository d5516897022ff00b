"""The toy config with a verifier, whose words are among those of the toy tokenizer."""

from ml_collections import ConfigDict

from tests.integration import toy_config


def get_config():
  """As toy_config, with a verifier of its own weights."""
  config = toy_config.get_config()
  config.roles.kind = 'verifier'
  config.roles.policy = 'judge'
  config.roles.answers = 2
  config.roles.verdicts = 4
  config.roles.max_tokens = 2
  config.roles.max_prompt_tokens = 8
  config.roles.words = ('one', 'two')
  config.roles.template = '{question} {answer}'
  config.policies.judge = ConfigDict(
    {
      'learner': ConfigDict({'learning_rate': 0.02}),
      'objective': ConfigDict({'advantage': 'group_std()'}),
    }
  )
  return config
