"""What each optimizer makes of a gradient before weight decay and learning rate.

Not for schedules or clipping (`optimizer.py`). Invariant: layers are stacked in one array, and no
statistic here is taken across them: every layer is treated as an array of its own.
"""

from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

_LAYERS = 'layers'
_STACKED_MATRIX = MuonDimensionNumbers(reduction_axis=2, output_axis=1)  # of kernels [L, out, in]
_MUON_RMS = 0.2  # of an update's entries: about that of Adam, so that learning rates carry over


def per_layer(transform: optax.GradientTransformation) -> optax.GradientTransformation:
  """`transform` on every layer of the stacked ones by itself, and on the rest of the parameters.

  Its state is {'rest': ..., 'layers': ...}, the second with an axis of layers in front.
  """

  def split(tree):
    rest = {name: leaf for name, leaf in tree.items() if name != _LAYERS}
    return rest, tree.get(_LAYERS, {})

  def init(params):
    rest, layers = split(params)
    stacked = jax.vmap(transform.init)(layers) if layers else ()
    return {'rest': transform.init(rest), _LAYERS: stacked}

  def update(updates, state, params=None):
    (rest, layers), (params_rest, params_layers) = split(updates), split(params)
    new: Any
    new, rest_state = transform.update(rest, state['rest'], params_rest)
    if not layers:
      return new, {'rest': rest_state, _LAYERS: ()}
    layers, stacked = jax.vmap(transform.update)(layers, state[_LAYERS], params_layers)
    return {**new, _LAYERS: layers}, {'rest': rest_state, _LAYERS: stacked}

  return optax.GradientTransformation(init, update)


def adafactor() -> optax.GradientTransformation:
  """Adafactor without momentum: second moments of large matrices by rows and columns alone.

  Updates are clipped to a root mean square of 1 in each array of each layer, and not multiplied by the
  size of the parameters, so that the learning rate means what it means with Adam.
  See "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", Shazeer and Stern
  (https://arxiv.org/abs/1804.04235), and "Scaling Vision Transformers", Zhai et al.
  (https://arxiv.org/abs/2106.04560).
  """
  return per_layer(optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)))


def muon(*, momentum: float, other: optax.GradientTransformation) -> optax.GradientTransformation:
  """Orthogonalised momentum for the matrices of layers; `other` for embeddings, heads, norms, biases.

  U = 0.2 sqrt(max(in, out)) NewtonSchulz(momentum) for each matrix of each layer.
  See "Muon is Scalable for LLM Training", Liu et al. (https://arxiv.org/abs/2502.16982).

  Args:
    momentum: decay of the momentum (Nesterov), 0 to 1.
    other: what makes updates of the parameters that are no matrices of layers.
  """

  def scaled(updates, params=None):
    del params
    return jax.tree.map(lambda u: _MUON_RMS * max(u.shape[1:]) ** 0.5 * u, updates)

  matrices = optax.chain(
    scale_by_muon(beta=momentum, weight_dimension_numbers=_dimension_numbers),
    optax.stateless(scaled),
  )
  return optax.partition({'muon': matrices, 'other': other}, _muon_labels)


def _dimension_numbers(updates: Any) -> Any:
  """Of every kernel that the partition left in; what it took out stays a hole."""
  return jax.tree.map(lambda _: _STACKED_MATRIX, updates)


def _muon_labels(params: Any) -> Any:
  def label(path, leaf):
    del leaf
    return 'muon' if path[0].key == _LAYERS and path[-1].key == 'kernel' else 'other'

  return jax.tree_util.tree_map_with_path(label, params)


def sgd(*, momentum: float) -> optax.GradientTransformation:
  """The gradient, or its running sum with decay `momentum`."""
  return optax.trace(decay=momentum) if momentum else optax.identity()


def schedule_free(
  base: optax.GradientTransformation, schedule: optax.Schedule, *, beta: float
) -> optax.GradientTransformationExtraArgs:
  """Averages of weights in the place of a momentum and a schedule.

  z moves by `base` along the gradient at y = (1 - β) z + β x, and x is the mean of the z, weighted by
  the squares of their learning rates. The parameters are y; x is what is published.
  See "The Road Less Scheduled", Defazio et al. (https://arxiv.org/abs/2405.15682).

  Args:
    base: the whole update of z, learning rate included, without a momentum of its own.
    schedule: its learning rate, from the updates made before.
    beta: β, above 0.

  Returns: a transform whose update takes the keyword `step_scale`, a factor of the step of z.
  """
  scaled = optax.chain(base, _scaled_by_argument())

  def rate(count: Any) -> Any:
    # optax counts the updates of the average from 1, those of the base from 0.
    return schedule(count - 1)

  return optax.contrib.schedule_free(scaled, rate, b1=beta)


def _scaled_by_argument() -> optax.GradientTransformationExtraArgs:
  def update(updates, state, params=None, *, step_scale=None, **unused):
    del params, unused
    if step_scale is None:
      return updates, state
    return jax.tree.map(lambda u: step_scale * u, updates), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def schedule_free_state(opt_state: Any) -> Any:
  """The state of `schedule_free` within an optimizer's (arrays or shapes); None where there is none."""

  def is_it(node):
    return isinstance(node, optax.contrib.ScheduleFreeState)

  found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_it) if is_it(x)]
  return found[0] if found else None


def averaged_weights(state: Any, params: Any) -> Any:
  """What a schedule-free run publishes, evaluates and exports: x, from `schedule_free_state` and y."""
  return optax.contrib.schedule_free_eval_params(state, params)
