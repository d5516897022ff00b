"""The picture and the page, from files as a run leaves them."""

import html.parser
import json
import math
import struct
from unittest import mock

import pytest
from absl import logging

from rlax_stack.observe import metric_names as names
from rlax_stack.observe import report, reward_curve
from rlax_stack.observe.json_files import write_lines_atomic
from rlax_stack.observe.run_folder import RunFolder

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(2)><!--&\u2028\ud800'


class Page(html.parser.HTMLParser):
  """The tags of a page and the text inside its script elements."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.scripts = [], []
    self._inside = False
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self._inside = tag == 'script'

  def handle_endtag(self, tag):
    self._inside = False

  def handle_data(self, data):
    if self._inside:
      self.scripts.append(data)


@pytest.fixture
def folder(tmp_path):
  folder = RunFolder(tmp_path, 'run')
  folder.create({})
  yield folder
  folder.close()


def write_metrics(folder, steps=30):
  records = [{'step': 0, names.HELD_OUT: 0.2}]
  for step in range(1, steps + 1):
    values = {names.REWARD: step / steps, names.RESPONSE_LENGTH: 9.0, names.ENTROPY: 1 / step}
    records.append({'step': step} | values)
  records.append({'step': steps, names.HELD_OUT: 0.9})
  write_lines_atomic(folder.metrics_path, records)


def png_size(path):
  data = path.read_bytes()
  assert data[:8] == b'\x89PNG\r\n\x1a\n'
  return struct.unpack('>II', data[16:24])


def test_series_keeps_the_last_finite_value_of_a_step():
  records = [
    {'step': 2, 'x': 5},
    {'step': 1, 'x': None},
    {'step': 1, 'x': 3.0},
    {'step': 2, 'x': 6},
  ]
  assert reward_curve.series(records, 'x') == ([1, 2], [3.0, 6.0])
  assert reward_curve.series(records, 'y') == ([], [])


def test_smooth_starts_at_the_first_value_and_keeps_a_constant():
  assert reward_curve.smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
  # Weights 0.5 and 1 over their sum: (0.5 * 0 + 1 * 3) / 1.5.
  assert reward_curve.smooth([0.0, 3.0], weight=0.5) == pytest.approx([0.0, 2.0])


def test_a_report_of_a_run(folder):
  write_metrics(folder)
  for split, step, text in (
    ('held_out', 0, 'seven'),
    ('held_out', 30, HOSTILE),
    ('train', 4, 'no'),
  ):
    record = {'step': step, 'prompt': '3 + 4?', 'completion': text, 'reward': 1.0}
    write_lines_atomic(folder.samples_dir / f'{split}-{step:06d}.jsonl', [record])
  title = f'model $x$ {HOSTILE[:40]}'
  result = report.write_report(
    folder, title=title, headline='0.20 -> 0.90', figures={'steps': 30, 'nan': math.nan}
  )
  assert png_size(result.picture) == (1170, 806)
  page = Page(result.page.read_text())
  assert page.tags.count('script') == 2 and page.tags.count('img') == 1
  data = json.loads(page.scripts[0])
  assert data['title'] == title
  assert data['figures'] == {'steps': 30, 'nan': 'nan'}
  shown = [(heading, rollouts[0]['completion']) for heading, rollouts in data['rollouts']]
  assert shown == [('Before', 'seven'), ('After', HOSTILE)]
  assert 'innerHTML' not in page.scripts[1] and 'http' not in page.scripts[1]


def test_embedded_json_cannot_end_its_element_and_comes_back():
  text = report.embedded_json({'x': HOSTILE})
  assert not set('<>&') & set(text) and text.isascii()
  assert json.loads(text) == {'x': HOSTILE}


def test_page_html_without_a_picture_has_no_image():
  text = report.page_html(title='t', headline='h', figures={}, rollouts=[], png=None)
  assert 'img' not in Page(text).tags
  assert "default-src 'none'" in text


def test_without_matplotlib_one_line_says_so(folder):
  write_metrics(folder)
  with (
    mock.patch.object(reward_curve.importlib.util, 'find_spec', return_value=None),
    mock.patch.object(logging, 'info') as info,
  ):
    result = report.write_report(folder, title='t', headline='h', figures={})
  assert result.picture is None and result.page.exists()
  assert info.call_count == 1 and 'matplotlib is not installed' in info.call_args[0][0]


def test_nothing_to_draw_and_a_single_step(folder):
  png = folder.report_dir / 'x.png'
  assert reward_curve.draw_reward_curve(folder.metrics_path, png, title='t') is None
  write_lines_atomic(folder.metrics_path, [{'step': 1, names.REWARD: -0.5}])
  assert reward_curve.draw_reward_curve(folder.metrics_path, png, title='t') == png


def test_a_failing_picture_and_a_failing_disk_are_only_logged(folder):
  write_metrics(folder)
  folder.report_dir.rmdir()
  with (
    mock.patch.object(report, 'draw_reward_curve', side_effect=RuntimeError('broken')),
    mock.patch.object(logging, 'warning') as warning,
  ):
    result = report.write_report(folder, title='t', headline='h', figures={})
  assert result == report.Report(None, None)
  assert warning.call_count == 2
