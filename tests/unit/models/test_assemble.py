"""Tensors of a file are compared with the config before any is read."""

import numpy as np
import pytest

from rlax_stack.errors import ModelFileError
from rlax_stack.models.assemble import assemble, check_shapes
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.layout import leaves

CONFIG = ModelConfig(
  vocab_size=6,
  hidden_size=4,
  intermediate_size=8,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=2,
)


def _shapes():
  return {
    leaf.hf_name.format(layer): leaf.shape
    for leaf in leaves(CONFIG)
    for layer in range(CONFIG.num_layers if leaf.stacked else 1)
  }


def _check(shapes):
  check_shapes(
    CONFIG,
    shapes,
    name_of=lambda leaf: leaf.hf_name,
    source='model.safetensors',
    ignore=lambda name: name.endswith('inv_freq'),
  )


def test_exact_shapes_pass_and_what_may_be_ignored_is():
  _check(_shapes() | {'model.layers.0.inv_freq': (1,)})


def test_another_shape_names_tensor_and_both_shapes():
  name = leaves(CONFIG)[0].hf_name
  with pytest.raises(ModelFileError, match=r'\(7, 4\), the config says \(6, 4\)'):
    _check(_shapes() | {name: (7, 4)})


def test_missing_and_unknown_tensors_are_refused():
  shapes = _shapes()
  missing = shapes.popitem()[0]
  with pytest.raises(ModelFileError, match=missing):
    _check(shapes)
  with pytest.raises(ModelFileError, match='extra.weight of shape'):
    _check(_shapes() | {'extra.weight': (1, 2)})


def test_assemble_stacks_layers_in_order():
  params = assemble(CONFIG, lambda leaf, place: np.full(leaf.shape, sum(place), np.float32))
  kernel = params['layers']['q_proj']['kernel']
  assert kernel.shape == (2, 4, 4)
  np.testing.assert_array_equal(kernel[:, 0, 0], [0, 1])
  assert params['embedder']['embedding'].shape == (6, 4)
