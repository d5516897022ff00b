"""The mesh and the one table that maps logical axis names to mesh axes.

Code names what an axis means ('heads', 'rows'); only this file says where it lives. Nothing here
touches a device when imported: meshes are made by the caller.

Invariant: a spec uses every mesh axis at most once, and every dimension divides by
the axes that it is split over.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlax_stack.errors import ConfigError

MESH_AXES = ('data', 'fsdp', 'tensor', 'context', 'expert')


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
  """Devices along each mesh axis; their product is the number of devices used."""

  data: int = 1  # rows of the batch, parameters replicated
  fsdp: int = 1  # rows of the batch, parameters split
  tensor: int = 1  # heads, feed-forward width, vocabulary
  context: int = 1  # tokens of one row
  expert: int = 1  # rows of the batch, experts of a mixture split

  def __post_init__(self):
    for axis in MESH_AXES:
      size = getattr(self, axis)
      if not isinstance(size, int) or size < 1:
        raise ConfigError(
          f'mesh axis {axis} must be a whole number >= 1, got {size!r}. Set config.mesh.{axis}.'
        )

  @property
  def sizes(self) -> tuple[int, ...]:
    """Sizes in the order of MESH_AXES."""
    return tuple(getattr(self, axis) for axis in MESH_AXES)


def make_mesh(
  shape: MeshShape | Mapping[str, int],
  devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
  """Makes a mesh with the five named axes over exactly the devices given.

  Args:
    shape: devices along each axis; axes left out of a mapping have size 1.
    devices: the devices to use; all of `jax.devices()` when None.

  Returns:
    A mesh with axes ('data', 'fsdp', 'tensor', 'context', 'expert'), all of type Auto. Where the devices
    are of several slices, `data` runs over the slices first, so that it alone uses the network between them.

  Raises:
    ConfigError: an unknown axis, a product of sizes other than the number of devices, or TPU slices over
      which `data` does not divide.
  """
  if not isinstance(shape, MeshShape):
    unknown = sorted(set(shape) - set(MESH_AXES))
    if unknown:
      raise ConfigError(f'unknown mesh axes {unknown}. The axes are {", ".join(MESH_AXES)}.')
    shape = MeshShape(**shape)
  found = list(jax.devices() if devices is None else devices)
  wanted = math.prod(shape.sizes)
  if wanted != len(found):
    arithmetic = ' x '.join(
      f'{axis} {size}' for axis, size in zip(MESH_AXES, shape.sizes, strict=True)
    )
    cure = 'Change the sizes in config.mesh'
    if wanted < len(found):
      cure += f', or pass devices=jax.devices()[:{wanted}] to leave {len(found) - wanted} idle'
    raise ConfigError(
      f'the mesh needs {arithmetic} = {wanted} devices, but there are {len(found)}. {cure}.'
    )
  types = (AxisType.Auto,) * len(MESH_AXES)
  over_slices = _over_slices(shape, found)
  if over_slices is not None:
    return Mesh(over_slices, MESH_AXES, axis_types=types)
  try:
    return jax.make_mesh(shape.sizes, MESH_AXES, axis_types=types, devices=found)
  except NotImplementedError:
    # An axis that is a part of one of the torus: its rings do not close, and nothing else would fit.
    placed = mesh_utils.create_device_mesh(shape.sizes, found, allow_split_physical_axes=True)
    return Mesh(placed, MESH_AXES, axis_types=types)


def _over_slices(shape: MeshShape, devices: Sequence[Any]) -> Any:
  """Devices of several slices laid out with whole slices along `data`; None where there is one slice.

  Nodes of GPUs over which `data` does not divide are laid out one after another: their network serves any axis.
  """
  held = collections.Counter(getattr(device, 'slice_index', 0) for device in devices)
  slices = len(held)
  if slices == 1:
    return None
  if shape.data % slices or len(set(held.values())) > 1:
    if devices[0].platform != 'tpu':
      in_order = sorted(devices, key=lambda device: (device.slice_index, device.id))
      return np.array(in_order).reshape(shape.sizes)
    counts = ' + '.join(str(held[index]) for index in sorted(held))
    raise ConfigError(
      f'the devices are of {slices} TPU slices ({counts}), and data {shape.data} is the axis that may lie over '
      f'several: it must be a multiple of {slices}, and slices of one size. Set '
      f'config.learner.mesh.data to a multiple of {slices}.'
    )
  within = (shape.data // slices, *shape.sizes[1:])
  across = (slices, *(1 for _ in within[1:]))
  return mesh_utils.create_hybrid_device_mesh(
    within, across, devices, allow_split_physical_axes=True
  )


@dataclasses.dataclass(frozen=True)
class LogicalRules:
  """Table from a logical axis name to a mesh axis, several mesh axes, or None (not split)."""

  table: Mapping[str, str | tuple[str, ...] | None]

  def __post_init__(self):
    for name in self.table:
      for axis in self.mesh_axes(name):
        if axis not in MESH_AXES:
          raise ConfigError(
            f'logical axis {name!r} is mapped to unknown mesh axis {axis!r}. '
            f'Choose from {MESH_AXES}.'
          )

  def mesh_axes(self, name: str | None) -> tuple[str, ...]:
    """Mesh axes of one logical axis; () for None. ConfigError for a name not in the table."""
    if name is None:
      return ()
    if name not in self.table:
      raise ConfigError(
        f'unknown logical axis {name!r}. Add it to the rules; '
        f'known: {", ".join(sorted(self.table))}.'
      )
    axes = self.table[name]
    if axes is None:
      return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)

  def spec_for(self, logical_axes: Sequence[str | None]) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions mean `logical_axes`.

    Raises:
      ConfigError: an unknown name, or one mesh axis used by two dimensions.
    """
    entries, user = [], {}
    for name in logical_axes:
      axes = self.mesh_axes(name)
      for axis in axes:
        if axis in user:
          raise ConfigError(
            f'mesh axis {axis!r} would split both {user[axis]!r} and {name!r} '
            f'of {tuple(logical_axes)}. Map one of them to another mesh axis or to None.'
          )
        user[axis] = name
      entries.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*entries)


DEFAULT_RULES = LogicalRules(
  {
    # parameters
    'layers': None,
    'vocab': 'tensor',
    'embed': 'fsdp',
    'heads': 'tensor',
    'mlp': 'tensor',
    'experts': 'expert',
    'norm': None,
    'value': None,
    'rank': None,
    'blocks': None,
    # activations and batches
    'rows': ('data', 'fsdp', 'expert'),
    'tokens': 'context',
    # Rows cut where `context` splits them, see learner/row_parts.py.
    'row_parts': ('data', 'fsdp', 'expert', 'context'),
    'features': None,
  }
)

_PARAM_AXES: dict[tuple[str, ...], tuple[str, ...]] = {
  ('embedder', 'embedding'): ('vocab', 'embed'),
  ('lm_head', 'kernel'): ('vocab', 'embed'),
  ('value_head', 'kernel'): ('value', 'embed'),
  ('value_head', 'bias'): ('value',),
  ('final_norm', 'scale'): ('norm',),
  ('attn_norm', 'scale'): ('layers', 'norm'),
  ('mlp_norm', 'scale'): ('layers', 'norm'),
  ('post_attn_norm', 'scale'): ('layers', 'norm'),
  ('post_mlp_norm', 'scale'): ('layers', 'norm'),
  ('q_norm', 'scale'): ('layers', 'norm'),
  ('k_norm', 'scale'): ('layers', 'norm'),
  ('q_proj', 'kernel'): ('layers', 'heads', 'embed'),
  ('k_proj', 'kernel'): ('layers', 'heads', 'embed'),
  ('v_proj', 'kernel'): ('layers', 'heads', 'embed'),
  ('q_proj', 'bias'): ('layers', 'heads'),
  ('k_proj', 'bias'): ('layers', 'heads'),
  ('v_proj', 'bias'): ('layers', 'heads'),
  ('o_proj', 'kernel'): ('layers', 'embed', 'heads'),
  ('gate_proj', 'kernel'): ('layers', 'mlp', 'embed'),
  ('up_proj', 'kernel'): ('layers', 'mlp', 'embed'),
  ('down_proj', 'kernel'): ('layers', 'embed', 'mlp'),
  ('router', 'kernel'): ('layers', 'norm', 'embed'),
  ('experts_gate', 'kernel'): ('layers', 'experts', 'mlp', 'embed'),
  ('experts_up', 'kernel'): ('layers', 'experts', 'mlp', 'embed'),
  ('experts_down', 'kernel'): ('layers', 'experts', 'embed', 'mlp'),
}


# Of adapters (models/adapter.py), which lie as the kernels beside them do.
_PARAM_AXES |= {
  (name, part): axes
  for (name, leaf), (layers, *sides) in tuple(_PARAM_AXES.items())
  if leaf == 'kernel' and layers == 'layers'
  for part, axes in {
    'lora_a': (layers, 'rank', sides[1]),
    'lora_b': (layers, sides[0], 'rank'),
    'magnitude': (layers, sides[0]),
  }.items()
}


def row_shards(sizes: Mapping[str, int], name: str = 'rows') -> int:
  """Parts that the rows of a batch, or its `row_parts`, are split into, by the sizes of the mesh axes."""
  return math.prod(sizes[axis] for axis in DEFAULT_RULES.mesh_axes(name))


def param_logical_axes(path: Sequence[Any], ndim: int) -> tuple[str, ...]:
  """Logical axes of one leaf, found by the last two dict keys of its path.

  Trees that mirror the parameters (optimizer moments) match as well, whatever wraps them; arrays of
  rank 0, such as a step count, have no axes. The values of a quantised kernel lie as the kernel does, and
  so do the outputs of its scales.

  Args:
    path: key path as `jax.tree_util.tree_flatten_with_path` gives it.
    ndim: rank of the leaf.

  Raises:
    ConfigError: a leaf that the table does not know, or of another rank than the table says.
  """
  if ndim == 0:
    return ()
  axes = _PARAM_AXES.get(parameter_name(path))
  if axes and getattr(path[-1], 'name', None) == 'scales':
    axes = (*axes[:-1], 'blocks')
  if axes is None or len(axes) != ndim:
    known = f'the table says {axes}' if axes else 'it is not in the table of rlax_stack/sharding.py'
    raise ConfigError(
      f'no logical axes for parameter {"/".join(_dict_keys(path))!r} of rank {ndim}: {known}.'
    )
  return axes


def parameter_name(path: Sequence[Any]) -> tuple[str, ...]:
  """The last two dict keys of a leaf's path, by which parameters and what mirrors them are known."""
  return _dict_keys(path)[-2:]


def _dict_keys(path: Sequence[Any]) -> tuple[str, ...]:
  return tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def _axes_of(entry: Any) -> tuple[str, ...]:
  """Mesh axes of one entry of a spec: None, a name or several."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def check_divisible(name: str, shape: Sequence[int], spec: PartitionSpec, mesh: Mesh) -> None:
  """Raises ConfigError (dimension, size, axis, cure) where `shape` does not divide over `spec`."""
  for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
    axes = [axis for axis in _axes_of(entry) if mesh.shape[axis] > 1]
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts:
      where = ' x '.join(f'{axis} {mesh.shape[axis]}' for axis in axes)
      raise ConfigError(
        f'dimension {dim} of {name} has size {size}, which does not divide by {where} = {parts}. '
        f'Choose config.mesh.{axes[-1]} so that the product divides {size}.'
      )


def sharding_for(
  mesh: Mesh,
  logical_axes: Sequence[str | None],
  *,
  shape: Sequence[int] | None = None,
  name: str = 'array',
  rules: LogicalRules = DEFAULT_RULES,
) -> NamedSharding:
  """NamedSharding by logical axes; with `shape`, divisibility is checked (ConfigError)."""
  spec = rules.spec_for(logical_axes)
  if shape is not None:
    check_divisible(name, shape, spec, mesh)
  return NamedSharding(mesh, spec)


def param_shardings(params: Any, mesh: Mesh, *, rules: LogicalRules = DEFAULT_RULES) -> Any:
  """Tree of NamedSharding for parameters, or for any tree that mirrors them (optimizer moments).

  Args:
    params: nested dict of arrays or ShapeDtypeStructs, with the names of the model's parameters.
    mesh: the mesh to place them on.
    rules: logical axis to mesh axis.

  Raises:
    ConfigError: an unknown parameter, or a dimension that does not divide.
  """

  def one(path, leaf):
    axes = param_logical_axes(path, leaf.ndim)
    return sharding_for(mesh, axes, shape=leaf.shape, name=jax.tree_util.keystr(path), rules=rules)

  return jax.tree_util.tree_map_with_path(one, params)


def optimizer_shardings(opt_state: Any, params: Any, mesh: Mesh) -> Any:
  """Tree of NamedSharding for an optimizer's state over `params`.

  What has a parameter's name lies as that parameter does; a statistic that lacks some of its axes (the
  rows and columns of Adafactor), or has them at size 1, as the axes that are left. Other arrays of
  rank 0 or 1, such as counts, are replicated.

  Args:
    opt_state: arrays or ShapeDtypeStructs, in whatever tuples optax wraps them.
    params: what it was made for.
    mesh: the mesh to place it on.

  Raises:
    ConfigError: an array of higher rank that belongs to no parameter, or does not divide.
  """
  owners = {
    parameter_name(path): (leaf.shape, param_logical_axes(path, leaf.ndim))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }

  def one(path, leaf):
    owner, where = owners.get(parameter_name(path)), jax.tree_util.keystr(path)
    axes = None if owner is None else _axes_left(leaf.shape, *owner)
    if axes is None:
      if leaf.ndim > 1:
        raise ConfigError(
          f'no logical axes for {where} of shape {leaf.shape} in the state of the optimizer: it '
          f'belongs to {owner or "no parameter"}.'
        )
      axes = (None,) * leaf.ndim
    return sharding_for(mesh, axes, shape=leaf.shape, name=where)

  return jax.tree_util.tree_map_with_path(one, opt_state)


def _axes_left(
  shape: Sequence[int], whole: Sequence[int], axes: Sequence[str]
) -> tuple[str | None, ...] | None:
  """Logical axes of a statistic of a parameter of shape `whole`; None where its shape is no part of that."""
  found, at = [], 0
  for size in shape:
    if size == 1:
      found.append(None)
      continue
    while at < len(whole) and whole[at] != size:
      at += 1
    if at == len(whole):
      return None
    found.append(axes[at])
    at += 1
  return tuple(found)
