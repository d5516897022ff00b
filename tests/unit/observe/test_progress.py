"""Progress: stable lines in a pipe, a panel on a terminal, and neither stops training."""

import io
import re
import sys
import threading
import time

import pytest
from absl import logging

from rlax_stack.observe import metric_names as names
from rlax_stack.observe import progress_view
from rlax_stack.observe.progress import Progress

VALUES = {
  names.REWARD: 0.4314,
  names.RESPONSE_LENGTH: 23.14,
  names.ENTROPY: 0.5124,
  names.TOKENS_PER_S: 511.7,
  names.STEP_TIME_S: 2.314,
  names.TIME + 'generate': 0.6,
  names.TIME + 'train': 0.33,
  names.STALENESS: 0.5,
  'something/else': 7,
}


class Clock:
  now_s = 50.0

  def __call__(self):
    return self.now_s


class Terminal(io.StringIO):
  encoding = 'utf-8'

  def isatty(self):
    return True

  def plain(self):
    return re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', self.getvalue())


@pytest.fixture
def terminal(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.setenv('COLUMNS', '100')
  monkeypatch.setenv('LINES', '40')
  return Terminal()


def test_piped_output_is_one_stable_line_per_step():
  stream, clock = io.StringIO(), Clock()
  with Progress(total_steps=12, stream=stream, clock=clock) as progress:
    progress.phase('loading the model')
    clock.now_s += 3.25
    progress.phase('compiling')
    progress.phase('compiling')
    progress.held_out(0, 0.2104)
    progress.update(1, VALUES)
    progress.phase('evaluating')  # after the start a phase leaves no line
    clock.now_s += 30
    progress.update(2, {})
    progress.message('resumed\x1b[2J')
  assert stream.getvalue().splitlines() == [
    '[   0.0 s] loading the model',
    '[   3.2 s] compiling',
    'step=0 held_out=0.210',
    'step=1/12 reward=0.431 held_out=0.210 length=23.1 entropy=0.512 tokens_per_s=512 step_s=2.31 '
    'generate=0.60 score=- train=0.33 publish=- checkpoint=- staleness=0.5 eta=-',
    'step=2/12 reward=- held_out=0.210 length=- entropy=- tokens_per_s=- step_s=- '
    'generate=- score=- train=- publish=- checkpoint=- staleness=- eta=5m00s',
    'resumed\\x1b[2J',
  ]


def test_nan_is_shown_as_missing_and_a_wrong_value_is_refused():
  stream = io.StringIO()
  progress = Progress(stream=stream)
  progress.update(1, {names.REWARD: float('nan')})
  assert stream.getvalue().startswith('step=1/- reward=- ')
  with pytest.raises(TypeError, match='must be one number'):
    progress.update(2, {names.REWARD: 'high'})


@pytest.mark.parametrize('closed', [True, False])
def test_a_reader_that_went_away_stops_nothing(closed):
  class Broken(io.StringIO):
    def write(self, text):
      raise BrokenPipeError

  stream = Broken()
  if closed:
    stream.close()
  with Progress(stream=stream) as progress:
    progress.phase('x')
    progress.update(1, VALUES)
    progress.held_out(1, 0.5)


def test_a_stream_that_cannot_encode_gets_escapes():
  raw = io.BytesIO()
  stream = io.TextIOWrapper(raw, encoding='ascii')
  Progress(stream=stream).message('caf\xe9')
  assert raw.getvalue() == b'caf\\xe9\n'


def test_the_panel_shows_everything_and_stays(terminal):
  clock = Clock()
  with Progress(total_steps=12, title='model [bold]x', stream=terminal, clock=clock) as progress:
    progress.phase('compiling')
    clock.now_s += 4
    progress.held_out(0, 0.21)
    progress.update(1, VALUES)
    clock.now_s += 30
    progress.held_out(2, 0.46)
    progress.update(2, VALUES)
  progress.close()
  text = terminal.plain()
  last = text[text.rindex('╭') :]
  for piece in ('model [bold]x', '2/12', '0.431', '0.21 -> 0.46', '23.1 tokens', 'entropy 0.512'):
    assert piece in last
  for piece in ('512 tokens/s', '2.31 s/step', 'generate 60%  train 33%', '34s', 'ETA 5m00s'):
    assert piece in last
  assert 'compiling 4s' in text
  assert 'step=0 held_out=0.210' in text


def test_a_resumed_run_takes_its_history_up(terminal):
  with Progress(total_steps=9, stream=terminal) as progress:
    progress.restore(rewards=[0.0, 0.5], held_out=[0.1])
    progress.update(7, {names.REWARD: 1.0, names.HELD_OUT: 0.9})
  last = terminal.plain()[terminal.plain().rindex('╭') :]
  assert '▁▅█' in last and '0.10 -> 0.90' in last


def test_redraws_are_bounded_and_threads_may_all_report(terminal):
  with Progress(total_steps=400, stream=terminal, refresh_hz=1000) as progress:
    start_s = time.monotonic()

    def report(offset):
      for step in range(100):
        progress.update(offset + step, VALUES)
        progress.phase(f'phase {step}')

    threads = [threading.Thread(target=report, args=(index * 100,)) for index in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(30)
    time.sleep(0.6)
    redraws, elapsed_s = terminal.plain().count('╭'), time.monotonic() - start_s
  # The first step ends the start-up phase, which leaves a line and redraws once more.
  assert redraws <= 4 * elapsed_s + 3


def test_absl_logs_go_above_the_panel_and_the_handler_is_given_back(terminal, monkeypatch):
  monkeypatch.setattr(sys, 'stderr', terminal)
  handler = logging.get_absl_handler().python_handler
  old = handler.setStream(terminal)
  try:
    with Progress(stream=terminal) as progress:
      progress.update(1, VALUES)
      assert handler.stream is sys.stderr and handler.stream is not terminal
      handler.stream.write('a [red]log[/red] line\n')
    assert handler.stream is terminal and sys.stderr is terminal
  finally:
    handler.setStream(old)
  assert 'a [red]log[/red] line' in terminal.plain()


def test_a_log_that_is_not_on_the_terminal_is_left_alone(terminal, monkeypatch):
  log = io.StringIO()
  monkeypatch.setattr(sys, 'stderr', log)
  with Progress(stream=terminal) as progress:
    progress.update(1, VALUES)
    sys.stderr.write('to the file\n')
  assert log.getvalue() == 'to the file\n'
  assert 'to the file' not in terminal.plain()


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
  monkeypatch.setenv('TERM', 'dumb')
  with Progress(stream=terminal) as progress:
    progress.update(1, VALUES)
  assert terminal.getvalue().startswith('step=1/- reward=0.431')


def test_final_line():
  assert (
    progress_view.final_line(0.2149, 0.871, 8.43) == 'held-out accuracy: 0.21 -> 0.87 in 8.4 min'
  )
  assert progress_view.final_line(None, 0.5, 0) == 'held-out accuracy: - -> 0.50 in 0.0 min'


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [
    (None, '-'),
    (float('inf'), '-'),
    (0.4, '0s'),
    (59.4, '59s'),
    (59.6, '1m00s'),
    (370, '6m10s'),
    (3900, '1h05m'),
    (183600, '2d03h'),
  ],
)
def test_duration(seconds, text):
  assert progress_view.duration(seconds) == text


def test_sparkline():
  assert progress_view.sparkline([]) == ''
  assert progress_view.sparkline([float('nan'), 2.0]) == '▁'
  assert progress_view.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == '▁▂▃▄▅▆▇█'
  assert progress_view.sparkline([0, 0, 1, 1], width=2) == '▁█'
  assert progress_view.sparkline([0, 1], ascii_only=True) == '_@'


def test_an_ascii_terminal_gets_only_ascii():
  view = progress_view.ProgressView(
    title='t',
    step=1,
    total_steps=None,
    values=VALUES,
    rewards=(0.1, 0.9),
    held_out=(),
    elapsed_s=1.0,
    eta_s=None,
    phase='training',
    phase_s=1.0,
  )
  from rich.console import Console

  class Ascii(io.StringIO):
    encoding = 'ascii'

  stream = Ascii()
  Console(file=stream, width=100).print(progress_view.panel(view, ascii_only=True))
  assert stream.getvalue().isascii()
  assert '_@' in stream.getvalue()
  assert progress_view.plain_line(view).startswith('step=1/- reward=0.431 held_out=- ')


def test_mode_off_shows_nothing_and_plain_writes_lines_on_a_terminal():
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  for mode, shown in (('off', ''), ('plain', 'hello\n')):
    stream = Terminal()
    with Progress(mode=mode, stream=stream) as progress:
      progress.message('hello')
    assert stream.getvalue() == shown
