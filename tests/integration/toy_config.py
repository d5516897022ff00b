"""The base config with the exact-answer verifier."""

from ml_collections import ConfigDict

from configs import base


def get_config():
  """As base, scored by exact answers."""
  config = base.get_config()
  config.rewards.verifiers = ConfigDict({'exact': ConfigDict({'weight': 1.0})})
  return config
