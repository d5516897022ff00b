"""One except clause catches every error raised on purpose; wrong values are ValueErrors too."""

import pytest

from rlax_stack import errors

WRONG_VALUES = (
  errors.ConfigError,
  errors.ModelFileError,
  errors.DataError,
  errors.PromptTooLongError,
)
FAILURES = (
  errors.RewardError,
  errors.CheckpointError,
  errors.StaleLeaseError,
  errors.NonFiniteError,
  errors.FleetError,
  errors.KernelError,
)


@pytest.mark.parametrize('kind', WRONG_VALUES + FAILURES)
def test_every_error_is_a_rlax_error_and_keeps_its_message(kind):
  with pytest.raises(errors.RlaxError, match='^what, value, cure$'):
    raise kind('what, value, cure')


def test_only_wrong_values_are_value_errors():
  assert all(issubclass(kind, ValueError) for kind in WRONG_VALUES)
  assert not any(issubclass(kind, ValueError) for kind in FAILURES)


def test_no_error_is_forgotten_here():
  named = {*WRONG_VALUES, *FAILURES, errors.RlaxError}
  assert {x for x in vars(errors).values() if isinstance(x, type)} == named
