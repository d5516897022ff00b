"""Access to reasoning-gym's tasks by name, without importing all hundred of them.

`import reasoning_gym` brings matplotlib and sympy and costs seconds; one task costs a fraction of one. So the
module of the task alone is imported, under empty parent packages, and the module table is put back afterwards:
a later `import reasoning_gym` by anyone works as always. Tasks whose file is not named like them take the slow way.
"""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import pathlib
import re
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from rlax_stack.errors import DataError

PACKAGE = 'reasoning_gym'
_LOCK = threading.Lock()

# These scorers hand the model's answer to `eval` or sympy's parser. Without attribute access, calls or
# underscores (in expressions: without names but single letters and elementary functions) nothing is left to run.
_LIST = re.compile(r"[A-Za-z0-9\s,\[\]'\"_-]*")
_ARITHMETIC = re.compile(r'(?:[0-9\s+\-*/()]|\.(?=[0-9]))*')
_ALGEBRA = re.compile(
  r'(?:(?:a?sin|a?cos|a?tan|sinh|cosh|tanh|sec|csc|cot|exp|log|ln|sqrt)(?![A-Za-z])|[A-Za-z](?![A-Za-z])'
  r'|[0-9\s+\-*/()^]|\.(?=[0-9]))*'
)
SAFE_ANSWERS = {
  'binary_matrix': _LIST,
  'n_queens': _LIST,
  'spiral_matrix': _LIST,
  'string_insertion': _LIST,
  'countdown': _ARITHMETIC,
  'puzzle24': _ARITHMETIC,
  'polynomial_multiplication': _ALGEBRA,
  'simple_integration': _ALGEBRA,
  'intermediate_integration': _ALGEBRA,
}


def is_safe_answer(task: str, answer: str) -> bool:
  """Whether the answer may be given to the task's scorer; False where it could run as code there."""
  pattern = SAFE_ANSWERS.get(task)
  return pattern is None or ('__' not in answer and pattern.fullmatch(answer) is not None)


def make_dataset(task: str, *, seed: int, size: int, task_kwargs: Mapping[str, Any]) -> Any:
  """reasoning-gym's dataset of `size` entries; entry i depends on (seed, i, task_kwargs) only.

  Raises DataError for an unknown task (with the nearest names) or options that the task refuses.
  """
  dataset_cls, config_cls = load_task(task)
  try:
    return dataset_cls(config_cls(seed=seed, size=size, **task_kwargs))
  except (TypeError, ValueError, AssertionError) as error:
    fields = sorted(getattr(config_cls, '__dataclass_fields__', {}))
    raise DataError(
      f'reasoning-gym task {task!r} refuses its options: {error}. Got task_kwargs={dict(task_kwargs)}, {seed=}, '
      f'{size=}; the task knows {", ".join(fields)}.'
    ) from error


@functools.lru_cache(maxsize=128)
def load_task(task: str) -> tuple[type, type]:
  """(dataset class, config class) of a task.

  Raises DataError if there is none (with the nearest names), ModuleNotFoundError without the package.
  """
  spec = importlib.util.find_spec(PACKAGE)
  if spec is None or not spec.submodule_search_locations:
    raise ModuleNotFoundError(
      'the package reasoning-gym is not installed: pip install reasoning-gym'
    )
  root = pathlib.Path(spec.submodule_search_locations[0])
  with _LOCK:
    found = _load_alone(task, root) if re.fullmatch(r'[a-z0-9_]+', task) else None
    return found or _load_with_all(task)


def _load_alone(task: str, root: pathlib.Path) -> tuple[type, type] | None:
  files = list(root.rglob(f'{task}.py'))
  if len(files) != 1 or PACKAGE in sys.modules:
    return None
  parts = files[0].relative_to(root).with_suffix('').parts
  with _empty_parents(root, parts[:-1]):
    try:
      importlib.import_module('.'.join((PACKAGE, *parts)))
      return importlib.import_module(f'{PACKAGE}.factory').DATASETS.get(task)
    except (
      ImportError,
      AttributeError,
    ):  # the task needs more of the package than its own imports say
      return None


@contextlib.contextmanager
def _empty_parents(root: pathlib.Path, parents: tuple[str, ...]) -> Iterator[None]:
  try:
    for depth in range(len(parents) + 1):
      package = types.ModuleType('.'.join((PACKAGE, *parents[:depth])))
      package.__path__ = [str(root.joinpath(*parents[:depth]))]
      sys.modules[package.__name__] = package
    yield
  finally:
    for name in [name for name in sys.modules if name.partition('.')[0] == PACKAGE]:
      del sys.modules[name]


def _load_with_all(task: str) -> tuple[type, type]:
  importlib.import_module(PACKAGE)
  datasets = importlib.import_module(f'{PACKAGE}.factory').DATASETS
  if task not in datasets:
    near = difflib.get_close_matches(task, datasets, n=3, cutoff=0.4) or sorted(datasets)
    raise DataError(
      f'reasoning-gym has no task {task!r}. The nearest names are: {", ".join(near)}.'
    )
  return datasets[task]
