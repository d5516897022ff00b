"""Random damage to model files: a reader gives a value or a ModelFileError, never anything else."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlax_stack.errors import ModelFileError
from rlax_stack.models.chat_template import render_chat
from rlax_stack.models.gguf import load_gguf
from rlax_stack.models.hf import load_hf, save_hf
from rlax_stack.models.hf_config import config_from_hf
from rlax_stack.models.hf_export import config_to_hf
from rlax_stack.models.json_file import parse_json_object
from rlax_stack.models.layout import get_leaf, leaves
from rlax_stack.models.safetensors_reader import read_header
from rlax_stack.types import Message

_FUZZ = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
# (where, what): where as a fraction, so that shrinking keeps its meaning
_EDITS = st.lists(
  st.tuples(st.integers(0, 2**20), st.sampled_from(('set', 'cut', 'put')), st.binary(max_size=8)),
  min_size=1,
  max_size=4,
)
_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
  ),
  max_leaves=6,
)


def _damage(raw, edits, header):
  """Applies the edits, most of them within the first `header` bytes, where the structure is."""
  raw = bytearray(raw)
  for where, kind, data in edits:
    index = where % (header if where % 8 else len(raw)) if raw else 0
    if kind == 'set':
      raw[index : index + len(data)] = data
    elif kind == 'cut':
      del raw[index : index + 1 + len(data)]
    else:
      raw[index:index] = data
  return bytes(raw)


@pytest.fixture
def gguf_file(gguf_bytes, gguf_metadata, random_tree, tiny_config):
  tree, tensors = random_tree(tiny_config), {}
  for leaf in leaves(tiny_config):
    for layer in range(tiny_config.num_layers if leaf.stacked else 1):
      value = get_leaf(tree, leaf.path)
      value = value[layer] if leaf.stacked else value
      tensors[leaf.gguf_name.format(layer)] = 'F32', value.shape, value.tobytes()
  return gguf_bytes(gguf_metadata(tiny_config), tensors)


@_FUZZ
@given(edits=_EDITS)
def test_damaged_gguf(gguf_file, tmp_path, edits):
  path = tmp_path / 'model.gguf'
  path.write_bytes(_damage(gguf_file, edits, 6000))
  try:
    load_gguf(path)
  except ModelFileError:
    pass


@_FUZZ
@given(raw=st.binary(max_size=200))
def test_random_bytes_behind_the_magic(tmp_path, raw):
  path = tmp_path / 'model.gguf'
  path.write_bytes(b'GGUF\x03\x00\x00\x00' + raw)
  with pytest.raises(ModelFileError):
    load_gguf(path)
  path.write_bytes(len(raw).to_bytes(8, 'little') + raw + bytes(8))
  with pytest.raises(ModelFileError):
    read_header(path)


@_FUZZ
@given(edits=_EDITS)
def test_damaged_safetensors(tiny_config, random_tree, tmp_path, edits):
  directory = tmp_path / 'model'
  if not directory.exists():
    save_hf(directory, tiny_config, random_tree(tiny_config))
    (directory / 'good').write_bytes((directory / 'model.safetensors').read_bytes())
  raw = (directory / 'good').read_bytes()
  (directory / 'model.safetensors').write_bytes(_damage(raw, edits, 2000))
  try:
    load_hf(directory)
  except ModelFileError:
    pass


@_FUZZ
@given(data=st.data())
def test_config_of_any_values(tiny_config, data):
  fields = config_to_hf(tiny_config)
  names = st.sampled_from((*fields, 'rope_parameters', 'layer_types', 'use_sliding_window'))
  fields |= data.draw(st.dictionaries(names, _JSON, max_size=4))
  fields['model_type'] = data.draw(st.sampled_from(('llama', 'mistral', 'qwen2', 'qwen3')))
  try:
    config_from_hf(fields)
  except ModelFileError:
    pass


@_FUZZ
@given(value=_JSON, edits=_EDITS)
def test_json_of_any_bytes(value, edits):
  raw = _damage(json.dumps({'a': value}).encode(), edits, 20)
  try:
    assert isinstance(parse_json_object(raw, name='x'), dict)
  except ModelFileError:
    pass


_WORDS = st.sampled_from(
  ('{% for m in messages %}', '{% endfor %}', '{{ m.role }}', '{{ loop.last }}', '{% if m %}')
  + ('{% endif %}', '{{ 1 // 0 }}', '{{ m[9] }}', '{{ "a" * m }}', '{% set x = messages %}', 'é')
  + ('{{ x | sort }}', '{{ x | sum }}', '{% macro f(a) %}', '{% endmacro %}', '{{ f(1, 2) }}', '%}')
  + (
    '{{ "a" ~ m }}',
    '{% block b %}',
    '{% endblock %}',
    '{{ -x }}',
    '{{ x ** x }}',
    '{%',
    '{{ x() }}',
  )
)


@_FUZZ
@given(words=st.lists(_WORDS, max_size=10))
def test_templates_of_any_words(words):
  try:
    render_chat(''.join(words), [Message(role='user', content='Hi')], special_tokens={})
  except ModelFileError:
    pass
