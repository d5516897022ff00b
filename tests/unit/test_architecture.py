"""The rules that hold the code base together, read from its syntax trees; nothing is imported.

Who may import whom (docs/design.md), what may never be called, and how large things may grow.
A rule is mended in the code, not here: exceptions below are few and each says why.
"""

import ast
import functools
import pathlib
import re
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / 'rlax_stack'

# Top-level modules that every room may import. Other top-level modules see everything (launch.py ...).
WORDS = {'types', 'config', 'errors', 'rng', 'sharding'}
ROOMS_BELOW = {
  'pallas_kernels': set(),
  'objectives': set(),
  'rewards': set(),
  'models': {'pallas_kernels', 'objectives', 'rewards'},
  'data': {'pallas_kernels', 'objectives', 'rewards'},
  'environments': {'pallas_kernels', 'objectives', 'rewards'},
  'rollout': {'pallas_kernels', 'objectives', 'rewards', 'models', 'data', 'environments'},
  'serving': {
    'pallas_kernels',
    'objectives',
    'rewards',
    'models',
    'data',
    'environments',
    'rollout',
  },
  'learner': {'pallas_kernels', 'objectives', 'rewards', 'models', 'data', 'environments'},
  'planning': {'pallas_kernels', 'objectives', 'rewards', 'models', 'data', 'rollout', 'learner'},
  'fleet': set(),  # is handed the engine, the learner and the verifiers; launch.py wires them
  'observe': set(),
}
NO_JAX_ROOMS = {'rewards', 'environments'}
JAX_FAMILY = {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'chex', 'grain'}

FORBIDDEN_IMPORTS = {
  'pickle', 'cPickle', 'cloudpickle', 'dill', 'joblib', 'marshal', 'shelve', 'torch', 'tensorflow',
}  # fmt: skip
FORBIDDEN_CALLS = {
  'eval', 'exec', 'compile', '__import__', 'torch.load', 'os.system', 'yaml.load', 'yaml.unsafe_load',
  'yaml.full_load',
}  # fmt: skip

MAX_FILE_LINES = 400
MAX_KERNEL_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

# Public names that no test mentions: only the command lines' own entry points.
UNTESTED_ALLOWED = {'main'}


def _parts(path: pathlib.Path) -> tuple[str, ...]:
  return path.relative_to(ROOT).with_suffix('').parts


def _label(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).as_posix()


def _files(*folders: str) -> list[pathlib.Path]:
  return sorted(path for folder in folders for path in (ROOT / folder).rglob('*.py'))


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding='utf-8'), filename=str(path))


def _imports(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  """Line and full dotted name of everything a file imports, relative imports resolved."""
  parts = _parts(path)
  package = parts[:-1]  # of a module and of an __init__ alike
  for node in ast.walk(_tree(path)):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = package[: len(package) + 1 - node.level] if node.level else ()
      module = '.'.join((*base, *([node.module] if node.module else [])))
      yield from ((node.lineno, f'{module}.{alias.name}') for alias in node.names)


def _room(dotted: str) -> str | None:
  """The room or top-level module of `rlax_stack` that a dotted name lies in."""
  parts = dotted.split('.')
  return parts[1] if parts[0] == 'rlax_stack' and len(parts) > 1 else None


def _direction_faults(path: pathlib.Path) -> list[str]:
  own = _room('.'.join(_parts(path)))
  if own in WORDS:
    allowed = WORDS
  elif own in ROOMS_BELOW:
    allowed = WORDS | ROOMS_BELOW[own] | {own}
  else:
    return []
  if (PACKAGE / own).is_dir():
    allowed = allowed | {'__version__'}
  return [
    f'{_label(path)}:{line} imports {name}: {own} may import only {sorted(allowed)}'
    for line, name in _imports(path)
    if _room(name) is not None and _room(name) not in allowed
  ]


def _dotted(node: ast.expr) -> str:
  """`a.b.c` of a call's function, or '' for anything more involved."""
  if isinstance(node, ast.Name):
    return node.id
  if isinstance(node, ast.Attribute):
    base = _dotted(node.value)
    return f'{base}.{node.attr}' if base else ''
  return ''


def _call_faults(path: pathlib.Path) -> Iterator[str]:
  for node in ast.walk(_tree(path)):
    if not isinstance(node, ast.Call):
      continue
    where, name = f'{_label(path)}:{node.lineno}', _dotted(node.func)
    if name in FORBIDDEN_CALLS or name.removeprefix('builtins.') in FORBIDDEN_CALLS:
      yield f'{where} calls {name}'
    for keyword in node.keywords:
      value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
      if keyword.arg == 'allow_pickle' and value is not False:
        yield f'{where} loads with allow_pickle'
      if keyword.arg == 'shell' and value is not False:
        yield f'{where} runs a shell'


def _functions(path: pathlib.Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
  for node in ast.walk(_tree(path)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      yield node


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
  """Lines of a function without its docstring, which may say as much as it needs to."""
  lines = node.end_lineno - node.lineno + 1
  if ast.get_docstring(node) is None:
    return lines
  return lines - (node.body[0].end_lineno - node.body[0].lineno + 1)


def _public(path: pathlib.Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
  for node in _tree(path).body:
    named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if named and not node.name.startswith('_'):
      yield node


def _names_to_test(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
  """Names that some test must hold: the own one, but for a record the ones of its public methods.

  Tests meet a record or a Protocol as what a function takes or returns.
  """
  if not isinstance(node, ast.ClassDef):
    return {node.name}
  bases = {_dotted(base).rpartition('.')[2] for base in node.bases}
  decorators = ' '.join(ast.unparse(decorator) for decorator in node.decorator_list)
  if 'Protocol' in bases:
    return set()
  if 'NamedTuple' in bases or 'dataclass' in decorators or '_frozen' in decorators:
    methods = (n.name for n in node.body if isinstance(n, ast.FunctionDef))
    return {name for name in methods if not name.startswith('_')}
  return {node.name}


def test_imports_go_downwards_only():
  faults = [fault for path in _files('rlax_stack') for fault in _direction_faults(path)]
  assert not faults, '\n'.join(faults)


@pytest.mark.parametrize(
  ('file', 'line', 'is_fault'),
  [
    ('learner/x.py', 'from rlax_stack.rollout import engine', True),
    ('learner/x.py', 'from rlax_stack.models.config import ModelConfig', False),
    ('rollout/x.py', 'import rlax_stack.learner.packing', True),
    ('rollout/x.py', 'from ..learner import packing', True),
    ('rollout/x.py', 'from .sampler import sample', False),
    ('rewards/x.py', 'from rlax_stack import types', False),
    ('models/x.py', 'from rlax_stack import launch', True),
    ('types.py', 'from rlax_stack.models import config', True),
    ('launch.py', 'from rlax_stack.rollout import engine', False),
  ],
)
def test_the_direction_rule_sees_a_fault(tmp_path, monkeypatch, file, line, is_fault):
  monkeypatch.setitem(globals(), 'ROOT', tmp_path)
  monkeypatch.setitem(globals(), 'PACKAGE', tmp_path / 'rlax_stack')
  path = tmp_path / 'rlax_stack' / file
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(line + '\n')
  assert bool(_direction_faults(path)) is is_fault


def test_rooms_are_known():
  rooms = {path.parent.name for path in PACKAGE.glob('*/__init__.py')}
  assert rooms <= ROOMS_BELOW.keys(), 'a new room needs its line in ROOMS_BELOW and docs/design.md'


def test_configs_import_ml_collections_only():
  faults = [
    f'{_label(path)}:{line} imports {name}'
    for path in _files('configs')
    for line, name in _imports(path)
    if name.split('.')[0] not in {'ml_collections', 'configs'}
  ]
  assert not faults, '\n'.join(faults)


def test_reward_and_environment_code_is_free_of_jax():
  """Also through what it imports: a reward process must start in a moment and own no device."""
  pending = [path for room in NO_JAX_ROOMS for path in _files(f'rlax_stack/{room}')]
  seen, faults = set(pending), []
  while pending:
    path = pending.pop()
    for line, name in _imports(path):
      if name.split('.')[0] in JAX_FAMILY:
        faults.append(f'{_label(path)}:{line} imports {name}')
      for cut in (name, name.rpartition('.')[0]):
        target = ROOT / (cut.replace('.', '/') + '.py')
        if cut.startswith('rlax_stack') and target.exists() and target not in seen:
          seen.add(target)
          pending.append(target)
  assert not faults, '\n'.join(faults)


def test_nothing_that_runs_code_from_data():
  faults = [
    f'{_label(path)}:{line} imports {name}'
    for path in _files('rlax_stack')
    for line, name in _imports(path)
    if name.split('.')[0] in FORBIDDEN_IMPORTS
  ]
  faults += [fault for path in _files('rlax_stack') for fault in _call_faults(path)]
  assert not faults, '\n'.join(faults)


@pytest.mark.parametrize(
  ('line', 'is_fault'),
  [
    ('eval("1")', True),
    ('builtins.exec("1")', True),
    ('np.load(path, allow_pickle=True)', True),
    ('np.load(path, allow_pickle=flag)', True),
    ('np.load(path, allow_pickle=False)', False),
    ('subprocess.run(command, shell=True)', True),
    ('yaml.load(text)', True),
    ('re.compile("a")', False),
    ('jax.eval_shape(f)', False),
  ],
)
def test_the_call_rule_sees_a_fault(tmp_path, monkeypatch, line, is_fault):
  monkeypatch.setitem(globals(), 'ROOT', tmp_path)
  path = tmp_path / 'sample.py'
  path.write_text(line + '\n')
  assert bool(list(_call_faults(path))) is is_fault


def test_no_assert_statement_and_no_future_annotations():
  """`python -O` removes asserts; postponed annotations blind the run-time shape checks."""
  faults = []
  for path in _files('rlax_stack', 'configs', 'benchmarks'):
    faults += [
      f'{_label(path)}:{n.lineno} assert'
      for n in ast.walk(_tree(path))
      if isinstance(n, ast.Assert)
    ]
    faults += [
      f'{_label(path)}:{line} imports {name}'
      for line, name in _imports(path)
      if name == '__future__.annotations' or name.endswith('.*')
    ]
  assert not faults, '\n'.join(faults)


def test_files_and_functions_stay_small():
  faults = []
  for path in _files('rlax_stack', 'configs', 'benchmarks', 'tests'):
    kernel = 'pallas_kernels' in path.parts
    lines = len(path.read_text(encoding='utf-8').splitlines())
    limit = MAX_KERNEL_FILE_LINES if kernel else MAX_FILE_LINES
    if lines > limit:
      faults.append(f'{_label(path)} has {lines} lines, over {limit}')
    if kernel or _label(path).startswith(('tests/', 'configs/')):
      continue
    for node in _functions(path):
      lines = _code_lines(node)
      if lines > MAX_FUNCTION_LINES:
        faults.append(f'{_label(path)}:{node.lineno} {node.name} has {lines} lines')
  assert not faults, '\n'.join(faults)
  assert not [_label(path) for path in _files('rlax_stack') if path.name == 'utils.py']


def test_public_code_is_documented():
  faults = []
  for path in _files('rlax_stack', 'benchmarks', 'configs'):
    if _tree(path).body and not ast.get_docstring(_tree(path)):
      faults.append(f'{_label(path)} has no docstring')
    for node in _public(path):
      documented = [node]
      if isinstance(node, ast.ClassDef):
        methods = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        documented += [method for method in methods if not method.name.startswith('_')]
      faults += [
        f'{_label(path)}:{n.lineno} {n.name} has no docstring'
        for n in documented
        if not ast.get_docstring(n)
      ]
  assert not faults, '\n'.join(faults)


def test_public_code_is_named_in_a_test():
  words = set()
  for path in _files('tests'):
    words |= set(re.findall(r'\w+', path.read_text(encoding='utf-8')))
  faults = [
    f'{_label(path)}:{node.lineno} {node.name}: {name} occurs in no test'
    for path in _files('rlax_stack')
    for node in _public(path)
    for name in sorted(_names_to_test(node) - words - UNTESTED_ALLOWED)
  ]
  assert not faults, '\n'.join(faults)


def test_torch_is_an_extra_for_parity_only():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  extras = project['optional-dependencies']
  heavy = re.compile(r'^(torch|transformers|tensorflow|nvidia)\b')
  for name, requirements in {'core': project['dependencies'], **extras}.items():
    assert name == 'parity' or not any(heavy.match(line) for line in requirements), name
  pins = (ROOT / 'constraints.txt').read_text().splitlines()
  assert not [line for line in pins if heavy.match(line)]


def _texts() -> Iterator[pathlib.Path]:
  """The files of the project that are text, wherever git may be absent."""
  folders = ('rlax_stack', 'configs', 'tests', 'benchmarks', 'docs', 'launch', '.ci')
  yield from (path for folder in folders for path in (ROOT / folder).rglob('*') if path.is_file())
  yield from (path for path in ROOT.iterdir() if path.is_file() and path.name != '.git')


def test_no_machine_paths_and_no_package_hosts():
  # In halves, so that this file does not hold them itself.
  halves = [
    ('/ro', 'ot/'), ('/wo', 'rk/'), ('/t', 'mp/'), ('/ho', 'me/'),
    ('pyp', 'i.org'), ('pythonho', 'sted'), ('np', 'mjs'), ('deb.deb', 'ian'),
  ]  # fmt: skip
  patterns = [first + second for first, second in halves]
  faults = []
  for path in _texts():
    if path.suffix in {'.pyc', '.png', '.gguf', '.npz', '.safetensors'}:
      continue
    text = path.read_text(encoding='utf-8', errors='replace')
    faults += [f'{_label(path)} holds {word}' for word in patterns if word in text]
  assert not faults, '\n'.join(faults)
