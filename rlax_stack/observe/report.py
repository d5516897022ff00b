"""The page at the end of a run: final figures, reward curve, some rollouts before and after.

One static file that works from disk: no network, no library. Text of a model is hostile: it travels
as JSON in a data block and becomes text nodes only.
Invariant: no string of a run ever becomes markup or script.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from rlax_stack.observe.json_files import to_json_value, write_text_atomic
from rlax_stack.observe.reward_curve import draw_reward_curve
from rlax_stack.observe.rollouts_writer import read_rollouts
from rlax_stack.observe.run_folder import RunFolder

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
body{color:#0f172a}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}img{max-width:100%}
table{border-collapse:collapse}td{padding:.15rem 1.2rem .15rem 0;vertical-align:top}
td:first-child{color:#64748b}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f1f5f9}
pre{padding:.6rem;border-radius:.4rem;margin:.2rem 0}
.meta{color:#64748b;font-size:.85rem;margin-top:1rem}.headline{font-size:1.2rem;font-weight:600}
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById('data').textContent);
const add = (parent, tag, text, name) => {
  const node = document.createElement(tag);
  node.textContent = text;
  if (name) node.className = name;
  parent.appendChild(node);
  return node;
};
document.title = data.title;
const head = document.getElementById('head');
add(head, 'h1', data.title);
add(head, 'p', data.headline, 'headline');
const table = add(document.getElementById('figures'), 'table', '');
for (const [name, value] of Object.entries(data.figures)) {
  const row = add(table, 'tr', '');
  add(row, 'td', name);
  add(row, 'td', String(value));
}
const list = document.getElementById('rollouts');
for (const [heading, rollouts] of data.rollouts) {
  add(list, 'h2', heading);
  for (const r of rollouts) {
    const worth = `step ${r.step} · reward ${r.reward}`;
    add(list, 'div', `${worth} · ${r.num_tokens} tokens · ${r.finish_reason}`, 'meta');
    add(list, 'pre', r.prompt);
    add(list, 'pre', r.completion);
  }
}
"""


class Report(NamedTuple):
  """Files that were written; None for one that could not be."""

  page: Path | None
  picture: Path | None


def write_report(
  folder: RunFolder,
  *,
  title: str,
  headline: str,
  figures: Mapping[str, Any],
  num_rollouts: int = 4,
) -> Report:
  """Writes `report/reward_curve.png` and `report/index.html` of a run from its own files.

  Args:
    title: model and task. headline: the achievement in one line (see progress_view.final_line).
    figures: final figures by name; JSON values.
    num_rollouts: shown from the first and from the last step that recorded some.

  A report that fails (a full disk, a broken plotting library) is logged; the run has ended well all
  the same.
  """
  picture = page = None
  try:
    picture = draw_reward_curve(
      folder.metrics_path, folder.report_dir / 'reward_curve.png', title=title, subtitle=headline
    )
  except Exception as error:  # a third-party library must not turn a good run into a failed one
    logging.warning('No reward-curve picture: %s: %s', type(error).__name__, error)
  try:
    content = page_html(
      title=title,
      headline=headline,
      figures=figures,
      rollouts=_before_and_after(folder.samples_dir, num_rollouts),
      png=picture.read_bytes() if picture else None,
    )
    page = folder.report_dir / 'index.html'
    write_text_atomic(page, content)
  except OSError as error:
    page = None
    logging.warning('No report page: %s', error)
  return Report(page, picture)


def page_html(
  *,
  title: str,
  headline: str,
  figures: Mapping[str, Any],
  rollouts: list[tuple[str, list[dict[str, Any]]]],
  png: bytes | None,
) -> str:
  """The page as one string. `rollouts` are (heading, records of rollouts_writer) pairs."""
  data = {'title': title, 'headline': headline, 'figures': figures, 'rollouts': rollouts}
  digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
  policy = (
    f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
  )
  image = ''
  if png is not None:
    image = f'<img alt="reward curve" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    f'<title>run</title><style>{_STYLE}</style></head><body>\n'
    f'<div id="head"></div>\n{image}\n<div id="figures"></div>\n<div id="rollouts"></div>\n'
    f'<script type="application/json" id="data">{embedded_json(data)}</script>\n'
    f'<script>{_SCRIPT}</script>\n</body></html>\n'
  )


def embedded_json(value: Any) -> str:
  """JSON that is safe inside an HTML script element: no `<`, `>` or `&` is left, so no tag can end
  it.
  """
  text = json.dumps(to_json_value(value), ensure_ascii=True, allow_nan=False)
  return text.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


def _before_and_after(samples_dir: Path, count: int) -> list[tuple[str, list[dict[str, Any]]]]:
  """Held-out rollouts where there are some, else training ones."""
  split = 'held_out' if any(samples_dir.glob('held_out-*.jsonl')) else 'train'
  before = read_rollouts(samples_dir, split=split, last=False)[:count]
  after = read_rollouts(samples_dir, split=split, last=True)[:count]
  if before == after:
    return [('Rollouts', before)] if before else []
  return [('Before', before), ('After', after)]
