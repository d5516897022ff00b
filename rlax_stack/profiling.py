"""What a run says of its own speed: traces of chosen steps, and how well the devices are used.

Not for the split of a step's time (`observe/timing.py`, `learner/step_clock.py`).
"""

import contextlib
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping

import jax
from absl import logging

from rlax_stack.config import RunConfig, to_plain
from rlax_stack.models.config import ModelConfig
from rlax_stack.planning.cost_model import model_flops
from rlax_stack.planning.topologies import peak_flops


class StepTraces:
  """Traces of chosen steps for xprof, one for each run of consecutive steps.

  Args:
    folder: a trace goes to `step_<first>` in it.
    steps: numbers of steps, the first one of a run being 1.
  """

  def __init__(self, folder: pathlib.Path, steps: Collection[int]):
    self._folder, self._steps = folder, frozenset(steps)
    self._tracing = False

  @contextlib.contextmanager
  def around(self, step: int) -> Iterator[None]:
    """Traces what runs within, where `step` is chosen; the trace ends with the last step of a run of them."""
    if step not in self._steps:
      yield
      return
    self._start(step)
    try:
      with jax.profiler.StepTraceAnnotation('step', step_num=step):
        yield
    finally:
      if step + 1 not in self._steps:
        self.close()

  def close(self) -> None:
    """Ends and writes the trace that is under way, if there is one."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()

  def _start(self, step: int) -> None:
    if self._tracing:
      return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of every thread would drown the rest
    try:
      jax.profiler.start_trace(self._folder / f'step_{step}', profiler_options=options)
      self._tracing = True
    except RuntimeError as error:  # another profiler is at work in this process
      logging.warning('step %d is not traced: %s', step, error)


def make_utilisation(
  config: RunConfig, model: ModelConfig, device_kind: str
) -> Callable[[Mapping[str, float], float], dict[str, float]]:
  """How well a run uses its devices.

  FLOPs are those that the packed tokens of a batch need, forward and backward, of the policy alone:
  nothing recomputed, no padding, log-probs scored beside the update left out.

  Args:
    config: of the run; config.profile.peak_tflops, where it is not 0, goes before the table.
    model: shape of the policy.
    device_kind: of the learner's devices, as jax names it.

  Returns: function (metrics of a batch, seconds of the learner's devices) -> metrics: model FLOPs per
    second of a device, and `perf/mfu`, their share of the peak, where that is known.
  """
  peak = config.profile.peak_tflops * 1e12 or peak_flops(device_kind)
  mesh = config.learner.mesh
  devices = math.prod(to_plain(mesh).values())

  def utilisation(packed: Mapping[str, float], seconds: float) -> dict[str, float]:
    flops = config.learner.updates_per_batch * model_flops(
      model,
      tokens=int(packed['row_tokens']),
      targets=int(packed['targets']),
      pairs=packed['pairs_per_layer'],
    )
    rate = flops / devices / seconds if seconds > 0 else 0.0
    return {'perf/model_flops_per_s': rate} | ({'perf/mfu': rate / peak} if peak else {})

  return utilisation
