import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rlax_stack import sharding
from rlax_stack.errors import ConfigError


def _params(layers=2, embed=16, heads=8, mlp=32, vocab=64):
  shapes = {
    'embedder': {'embedding': (vocab, embed)},
    'layers': {
      'attn_norm': {'scale': (layers, embed)},
      'q_proj': {'kernel': (layers, heads, embed), 'bias': (layers, heads)},
      'o_proj': {'kernel': (layers, embed, heads)},
      'gate_proj': {'kernel': (layers, mlp, embed)},
      'down_proj': {'kernel': (layers, embed, mlp)},
    },
    'final_norm': {'scale': (embed,)},
  }
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    shapes,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def test_make_mesh_has_the_five_axes_in_order():
  mesh = sharding.make_mesh({'data': 2, 'tensor': 2}, jax.devices()[:4])
  assert mesh.axis_names == ('data', 'fsdp', 'tensor', 'context', 'expert')
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 1, 'tensor': 2, 'context': 1, 'expert': 1}
  assert sharding.make_mesh(sharding.MeshShape(), jax.devices()[:1]).size == 1


def test_make_mesh_shows_its_arithmetic():
  with pytest.raises(ConfigError, match=r'data 2 x fsdp 2 .* = 4 devices, but there are 3'):
    sharding.make_mesh({'data': 2, 'fsdp': 2}, jax.devices()[:3])
  with pytest.raises(ConfigError, match=r'jax.devices\(\)\[:2\] to leave 2 idle'):
    sharding.make_mesh({'data': 2}, jax.devices()[:4])
  with pytest.raises(ConfigError, match='unknown mesh axes'):
    sharding.make_mesh({'pipeline': 2})
  with pytest.raises(ConfigError, match='config.mesh.tensor'):
    sharding.MeshShape(tensor=0)


class _Chip:
  """A chip of a 2 x 2 slice, or a GPU of a node, as far as a mesh looks at it."""

  def __init__(self, number, platform='tpu'):
    self.id, self.process_index = number, number // 4
    self.slice_index = number // 4
    self.coords, self.core_on_chip = (number % 2, number // 2 % 2, 0), 0
    self.platform, self.device_kind = platform, 'TPU v5' if platform == 'tpu' else 'H100'


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize('sizes', [(2, 4, 1, 1, 1), (4, 1, 2, 1, 1), (2, 2, 1, 2, 1)])
def test_data_alone_runs_over_slices(platform, sizes):
  # Slices mixed among each other: where a device stands in the list says nothing.
  chips = [_Chip(i, platform) for i in (0, 4, 5, 1, 2, 6, 7, 3)]
  devices = sharding.make_mesh(dict(zip(sharding.MESH_AXES, sizes, strict=True)), chips).devices
  assert devices.shape == sizes
  for place, chip in np.ndenumerate(devices):
    assert chip.slice_index == place[0] * 2 // sizes[0]
  assert {chip.id for chip in devices.flat} == set(range(8))


def test_slices_that_data_does_not_divide_over():
  with pytest.raises(ConfigError, match=r'2 TPU slices \(4 \+ 4\), and data 1 .* multiple of 2'):
    sharding.make_mesh({'fsdp': 8}, [_Chip(i) for i in range(8)])
  with pytest.raises(ConfigError, match=r'2 TPU slices \(4 \+ 2\), and data 2 .*of one size'):
    sharding.make_mesh({'data': 2, 'fsdp': 3}, [_Chip(i) for i in range(6)])
  nodes = sharding.make_mesh({'fsdp': 8}, [_Chip(i, 'gpu') for i in (4, 0, 5, 1, 6, 2, 7, 3)])
  assert [gpu.id for gpu in nodes.devices.flat] == list(range(8))


def test_spec_for_maps_names():
  rules = sharding.DEFAULT_RULES
  assert rules.spec_for(('layers', 'heads', 'embed')) == P(None, 'tensor', 'fsdp')
  assert rules.spec_for(('rows', 'tokens', None)) == P(('data', 'fsdp', 'expert'), 'context', None)
  with pytest.raises(ConfigError, match="mesh axis 'fsdp' would split both 'rows' and 'embed'"):
    rules.spec_for(('rows', 'embed'))
  with pytest.raises(ConfigError, match="unknown logical axis 'hats'"):
    rules.spec_for(('hats',))
  with pytest.raises(ConfigError, match="unknown mesh axis 'rack'"):
    sharding.LogicalRules({'rows': 'rack'})


def test_param_shardings_split_parameters_and_their_mirrors():
  mesh = sharding.make_mesh({'fsdp': 4, 'tensor': 2}, jax.devices()[:8])
  params = _params()
  shardings = sharding.param_shardings(params, mesh)
  assert shardings['embedder']['embedding'].spec == P('tensor', 'fsdp')
  assert shardings['layers']['o_proj']['kernel'].spec == P(None, 'fsdp', 'tensor')
  assert shardings['layers']['q_proj']['bias'].spec == P(None, 'tensor')
  assert shardings['layers']['attn_norm']['scale'].spec == P(None, None)
  placed = jax.device_put(np.zeros((64, 16), np.float32), shardings['embedder']['embedding'])
  assert placed.addressable_shards[0].data.shape == (32, 4)
  state = (jax.ShapeDtypeStruct((), jnp.int32), {'mu': params})
  mirrored = sharding.param_shardings(state, mesh)
  assert mirrored[0].spec == P()
  assert mirrored[1]['mu']['layers']['q_proj']['kernel'].spec == P(None, 'tensor', 'fsdp')


def test_experts_are_split_over_their_axis():
  mesh = sharding.make_mesh({'fsdp': 2, 'tensor': 2, 'expert': 2}, jax.devices()[:8])
  shapes = {'router': (2, 4, 16), 'experts_up': (2, 4, 32, 16), 'experts_down': (2, 4, 16, 32)}
  layers = {
    name: {'kernel': jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in shapes.items()
  }
  found = sharding.param_shardings({'layers': layers}, mesh)['layers']
  assert found['router']['kernel'].spec == P(None, None, 'fsdp')
  assert found['experts_up']['kernel'].spec == P(None, 'expert', 'tensor', 'fsdp')
  assert found['experts_down']['kernel'].spec == P(None, 'expert', 'fsdp', 'tensor')


def test_param_shardings_name_what_does_not_fit():
  mesh = sharding.make_mesh({'fsdp': 4}, jax.devices()[:4])
  with pytest.raises(
    ConfigError, match=r'dimension 1 of .*embedding.* size 18, .* fsdp 4 = 4.*config.mesh.fsdp'
  ):
    sharding.param_shardings(_params(embed=18), mesh)
  with pytest.raises(ConfigError, match="no logical axes for parameter 'layers/wig/kernel'"):
    sharding.param_shardings({'layers': {'wig': {'kernel': jnp.zeros((1, 2, 2))}}}, mesh)


def test_sharding_for_checks_batch_rows():
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2}, jax.devices()[:4])
  assert sharding.sharding_for(mesh, ('rows', None)).spec == P(('data', 'fsdp', 'expert'), None)
  assert sharding.row_shards(mesh.shape) == 4
  with pytest.raises(ConfigError, match='dimension 0 of tokens has size 6, .* data 2 x fsdp 2 = 4'):
    sharding.sharding_for(mesh, ('rows', 'tokens'), shape=(6, 64), name='tokens')


def test_check_divisible_accepts_what_divides():
  mesh = sharding.make_mesh({'tensor': 2}, jax.devices()[:2])
  sharding.check_divisible('x', (4, 3), P('tensor', None), mesh)


def test_param_logical_axes_reads_the_last_two_keys():
  path = (
    jax.tree_util.DictKey('layers'),
    jax.tree_util.DictKey('q_proj'),
    jax.tree_util.DictKey('kernel'),
  )
  assert sharding.param_logical_axes(path, 3) == ('layers', 'heads', 'embed')
  with pytest.raises(ConfigError, match='rank 2'):
    sharding.param_logical_axes(path, 2)


def test_mesh_axes_of_a_logical_axis():
  rules = sharding.LogicalRules({'rows': ('data', 'fsdp'), 'heads': 'tensor', 'embed': None})
  assert rules.mesh_axes('rows') == ('data', 'fsdp')
  assert rules.mesh_axes('heads') == ('tensor',)
  assert rules.mesh_axes('embed') == rules.mesh_axes(None) == ()
  with pytest.raises(ConfigError, match="unknown logical axis 'head'"):
    rules.mesh_axes('head')


def _leaf(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_optimizer_shardings_follow_what_is_left_of_a_parameter():
  mesh = sharding.make_mesh({'fsdp': 2, 'tensor': 2}, jax.devices()[:4])
  params = _params()
  del params['layers']['o_proj']
  state = {
    'moments': params,
    'count': _leaf(2),
    'layers': {
      'q_proj': {'kernel': _leaf(2, 8), 'bias': _leaf(2, 1)},
      'gate_proj': {'kernel': _leaf(2, 16)},
      'down_proj': {'kernel': _leaf(1)},
    },
  }
  found = jax.tree.map(lambda s: s.spec, sharding.optimizer_shardings(state, params, mesh))
  assert found['moments']['layers']['q_proj']['kernel'] == P(None, 'tensor', 'fsdp')
  assert found['moments']['final_norm']['scale'] == P(None)
  assert found['count'] == P(None)
  assert found['layers'] == {
    'q_proj': {'kernel': P(None, 'tensor'), 'bias': P(None, None)},
    'gate_proj': {'kernel': P(None, 'fsdp')},
    'down_proj': {'kernel': P(None)},
  }
  with pytest.raises(ConfigError, match=r'shape \(3, 8\) in the state of the optimizer'):
    sharding.optimizer_shardings({'q_proj': {'kernel': _leaf(3, 8)}}, params['layers'], mesh)
  with pytest.raises(ConfigError, match='no parameter'):
    sharding.optimizer_shardings({'whole': _leaf(3, 8)}, params, mesh)


def test_parameter_name_is_the_end_of_the_path():
  tree = ({'muon': {'layers': {'q_proj': {'kernel': 0}}}},)
  [(path, _)] = jax.tree_util.tree_leaves_with_path(tree)
  assert sharding.parameter_name(path) == ('q_proj', 'kernel')
