"""Signals become a request; the second one stops at once."""

import os
import signal

import pytest

from rlax_stack.stop_signal import StopSignal


def test_first_signal_is_a_request_and_handlers_come_back():
  before = signal.getsignal(signal.SIGTERM)
  heard = []
  with StopSignal(heard.append) as stop:
    assert stop.received is None and stop.exit_code == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == ['SIGTERM']
    assert stop.exit_code == 143
  assert signal.getsignal(signal.SIGTERM) is before


def test_second_signal_stops_at_once():
  with StopSignal(lambda name: None) as stop:
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match='second SIGINT'):
      os.kill(os.getpid(), signal.SIGINT)
    assert stop.exit_code == 130
