"""The errors that users meet.

Each message says what is wrong, with which value, and how to cure it.
"""


class RlaxError(Exception):
  """Base of every error that the project raises on purpose; the command line prints it without a
  trace.
  """


class ConfigError(RlaxError, ValueError):
  """A config value, or a combination of values, that cannot work."""


class ModelFileError(RlaxError, ValueError):
  """A weight, tokenizer or template file that is missing, torn, hostile or of another shape than
  the config.
  """


class DataError(RlaxError, ValueError):
  """A prompt source that is missing, empty or malformed."""


class PromptTooLongError(RlaxError, ValueError):
  """A prompt that does not fit the context that the config gives it."""


class RewardError(RlaxError):
  """A verifier that failed (crashed, timed out, answered NaN).

  It is counted; it is never a reward of 0.
  """


class CheckpointError(RlaxError):
  """A checkpoint that cannot be restored, or a workdir that belongs to another run."""


class StaleLeaseError(RlaxError):
  """A result under a lease that has expired or was given to another worker (fencing)."""


class NonFiniteError(RlaxError):
  """Too many steps in a row had a non-finite loss or gradient."""


class KernelError(RlaxError):
  """A kernel whose results on this device are not those of its reference."""


class FleetError(RlaxError):
  """A worker, the coordinator or the parameter server failed, or did not answer in time."""
