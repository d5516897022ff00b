"""The loop of a run: batch, train, publish, evaluate, save. One object, one step at a time.

The order of calls is the contract of the coordinator: `next_batch(v)`, train, `mark_trained`,
publish v + 1, `on_published(v + 1)`. A checkpoint is taken between steps, so that everything in it is
of one instant. Not for building parts (assembly) or for the terminal (launch).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from rlax_stack.compile_counter import CompileCount, CompileCounter
from rlax_stack.config import RunConfig
from rlax_stack.errors import CheckpointError
from rlax_stack.evaluation import Evaluation, evaluate_groups
from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.learner.joint_learner import JointLearner, JointMetrics
from rlax_stack.learner.learner import Learner
from rlax_stack.learner.step_clock import StepMetrics
from rlax_stack.observe import metric_names as names
from rlax_stack.observe.metrics import Metrics
from rlax_stack.observe.progress import Progress
from rlax_stack.observe.rollouts_writer import RolloutsWriter
from rlax_stack.observe.timing import TimeSplit
from rlax_stack.profiling import StepTraces
from rlax_stack.types import Group

_LOOK_AGAIN_S = 0.005
_WARM_STEPS = 2  # steps after which no program may be compiled any more


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopParts:
  """What the loop works with.

  `warm_up()` compiles the engine's programs; `evaluate()` samples and scores the held-out prompts
  with the newest published weights; `score_seconds()` is what the worker spent on verdicts so far;
  `engine_figures()` are metrics of the engine since it was last asked; `utilisation(packed, seconds)`
  are those of the learner's devices, which worked so long on a batch. `roles` says which policy plays a role, '' being
  the first of both.
  """

  learner: Learner | JointLearner
  coordinator: Coordinator
  parameter_server: ParameterServer
  checkpointer: Checkpointer
  metrics: Metrics
  rollouts: RolloutsWriter
  progress: Progress
  compile_counter: CompileCounter
  warm_up: Callable[[], None]
  evaluate: Callable[[], list[Group]]
  score_seconds: Callable[[], float]
  engine_figures: Callable[[], dict[str, float]]
  utilisation: Callable[[Mapping[str, float], float], dict[str, float]]
  traces: StepTraces
  stop_requested: Callable[[], bool]
  roles: Mapping[str, str] = dataclasses.field(default_factory=lambda: {'': ''})


@dataclasses.dataclass
class Account:
  """What the run has to say at its end; saved with every checkpoint."""

  held_out_before: float | None = None
  held_out_after: float | None = None
  train_seconds: float = 0.0  # in steps: compilation, evaluations and checkpoints left out


class TrainLoop:
  """Runs a config from wherever its parts stand."""

  def __init__(self, config: RunConfig, parts: LoopParts, account: Account):
    self.account = account
    self._config, self._parts = config, parts
    self._split = TimeSplit()
    self._warm: CompileCount | None = None
    self._first_step = parts.learner.version
    self._saved_at = self._evaluated_at = -1
    self._scored_s = 0.0

  @property
  def step(self) -> int:
    """Batches trained."""
    return self._parts.learner.version

  def run(self) -> bool:
    """Trains up to `config.steps`; False where it was asked to stop before."""
    learner, config = self._parts.learner, self._config
    self._publish()
    self._parts.progress.phase('compiling the engine')
    self._parts.warm_up()
    self._parts.checkpointer.warm_up(learner.state)
    if self.account.held_out_before is None:
      self.account.held_out_before = self._evaluate().accuracy
    self._parts.coordinator.on_published(learner.version)
    self._split.lap()
    while learner.version < config.steps:
      if self._parts.stop_requested():
        break
      with self._parts.traces.around(learner.version + 1):
        goes_on = self._step()
      if not goes_on:
        break
    finished = not self._parts.stop_requested()
    if finished and (self._evaluated_at != learner.version):
      self._evaluate()
    self.save()
    return finished

  def _step(self) -> bool:
    """One batch; False where no more will come."""
    parts, split = self._parts, self._split
    start_s, version = time.monotonic(), parts.learner.version
    mark = parts.compile_counter.count
    with split.measure('generate'):
      groups = parts.coordinator.next_batch(version, timeout_s=self._config.fleet.batch_timeout_s)
    if not groups:
      return False
    trained = self._train(groups)
    self._end(groups, trained)
    with split.measure('publish'):
      self._publish()
    step = parts.learner.version
    evaluated = self._due(self._config.eval.every_steps, step) and step < self._config.steps
    compiling_s = parts.compile_counter.since(mark).seconds
    self.account.train_seconds += max(0.0, time.monotonic() - start_s - compiling_s)
    extra = _evaluation_metrics(self._evaluate(write=False)) if evaluated else {}
    parts.coordinator.on_published(step)
    self._report(step, groups, trained | extra)
    if self._due(self._config.checkpoint.every_steps, step):
      with split.measure('checkpoint'):
        self.save()
    return True

  def _end(self, groups: Sequence[Group], trained: Mapping[str, float]) -> None:
    """Tells the coordinator what was trained on: the groups of a role end before the one that they came of."""
    roles, coordinator = self._parts.roles, self._parts.coordinator
    skipped = {
      role for role, policy in roles.items() if trained[_train_name('skipped_in_row', policy)]
    }
    others = [other for group in groups for other in group.others]
    for part in (others, groups):
      if lost := [group for group in part if group.role in skipped]:
        coordinator.mark_filtered(lost)
      if kept := [group for group in part if group.role not in skipped]:
        coordinator.mark_trained(kept)

  def _train(self, groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of training on a batch; splits its time."""
    split = self._split
    with split.measure('train'):
      step = self._parts.learner.train(groups)
      self._prepare_next(step)
      metrics = step.result()
    seconds = step.seconds()
    for name in ('data', 'log_probs'):
      split.move('train', name, seconds.get(name, 0.0))
    worked_s = seconds['train'] + seconds.get('log_probs', 0.0)
    used = self._parts.utilisation(metrics, worked_s)
    # The names of other policies begin with theirs.
    return {n if '/' in n else f'train/{n}': value for n, value in metrics.items()} | used

  def _prepare_next(self, step: StepMetrics | JointMetrics) -> None:
    """Packs the batch after this one while the devices work, if it is there before they are done."""
    parts, version = self._parts, self._parts.learner.version
    while self._config.fleet.max_staleness and version < self._config.steps:
      likely = parts.coordinator.likely_batch(version)
      if likely is not None:
        parts.learner.prepare(likely)
        return
      if step.is_ready():
        return
      time.sleep(_LOOK_AGAIN_S)

  def _due(self, every: int, step: int) -> bool:
    return every > 0 and step % every == 0

  def _publish(self) -> None:
    learner = self._parts.learner
    self._parts.parameter_server.publish(learner.version, learner.snapshot(), copy=False)

  def _evaluate(self, *, write: bool = True) -> Evaluation:
    """Samples the held-out prompts under the newest weights; records and shows the result."""
    parts, config = self._parts, self._config
    step = parts.learner.version
    parts.progress.phase('held-out evaluation')
    with self._split.measure('evaluate'):
      groups = parts.evaluate()
    result = evaluate_groups(
      groups,
      label=next(iter(config.rewards.verifiers)),
      correct_at=config.eval.correct_at,
      pass_at=config.eval.pass_at,
      vote=config.eval.vote,
    )
    self.account.held_out_after, self._evaluated_at = result.accuracy, step
    parts.rollouts.write(step, groups, split='held_out')
    if write:
      parts.metrics.write(step, _evaluation_metrics(result))
      parts.progress.held_out(step, result.accuracy)
    return result

  def _report(self, step: int, groups: Sequence[Group], trained: dict[str, float]) -> None:
    """Writes and shows the metrics of one step."""
    parts = self._parts
    self._split_scoring()
    lap = self._split.lap()
    values = batch_metrics(groups, lap.total_s) | role_metrics(groups)
    values |= trained | parts.coordinator.metrics()
    values |= parts.engine_figures()
    values[names.STALENESS] = values['fleet/staleness_mean']
    values[names.STEP_TIME_S] = lap.total_s
    fractions = dict.fromkeys(names.MEASURED, 0.0) | lap.fractions
    values |= names.time_values(fractions)
    values[names.IDLE] = fractions['generate'] + fractions['score']
    values['perf/compilations'] = float(self._count_compilations(step))
    parts.metrics.write(step, values)
    parts.progress.update(step, values)
    parts.rollouts.write(step, [group for visit in groups for group in visit.of_all_roles])

  def _split_scoring(self) -> None:
    """Takes the worker's scoring time out of the time that the learner waited for a batch."""
    seconds = self._parts.score_seconds()
    # A worker that is ahead scores while the learner does other things.
    self._split.move('generate', 'score', seconds - self._scored_s)
    self._scored_s = seconds

  def _count_compilations(self, step: int) -> int:
    """Programs compiled since the warm-up; each one is a stall that a static shape would avoid."""
    counter = self._parts.compile_counter
    if self._warm is None:
      if step - self._first_step >= _WARM_STEPS:
        self._warm = counter.count
      return 0
    since = counter.since(self._warm)
    if since.programs:
      logging.warning('step %d: compiled again: %s', step, ', '.join(since.names))
      self._warm = counter.count
    return since.programs

  def save(self) -> None:
    """Commits learner, ledger, prompt position and account of this instant; once per version."""
    parts, version = self._parts, self._parts.learner.version
    if version == self._saved_at:
      return
    parts.progress.phase('saving')
    parts.metrics.flush()
    extras = {
      'coordinator': parts.coordinator.state(),
      'account': dataclasses.asdict(self.account),
      'objective': parts.learner.host_state,
    }
    if parts.learner.adapter_identity is not None:
      extras['adapter'] = parts.learner.adapter_identity
    parts.checkpointer.save(version, parts.learner.state, extras)
    self._saved_at = version


def batch_metrics(groups: Sequence[Group], seconds: float) -> dict[str, float]:
  """Rewards, lengths and speed of one batch that took `seconds` of wall time."""
  trajectories = [trajectory for group in groups for trajectory in group.trajectories]
  rewards = [t.reward.value for t in trajectories if t.reward and t.reward.value is not None]
  lengths = [t.num_sampled for t in trajectories]
  mean = sum(rewards) / len(rewards)
  values = {
    names.REWARD: mean,
    'reward/std': (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
    'reward/groups_without_variance': float(sum(_is_flat(group) for group in groups)),
    names.RESPONSE_LENGTH: sum(lengths) / len(lengths),
    'rollout/response_length_max': float(max(lengths)),
    'rollout/several_versions': sum(t.oldest_version < t.newest_version for t in trajectories)
    / len(trajectories),
    'rollout/truncated': sum(t.finish_reason == 'length' for t in trajectories) / len(trajectories),
    names.TOKENS_PER_S: sum(lengths) / seconds if seconds > 0 else 0.0,
  }
  if any(t.kept_ids_t is not None for t in trajectories):
    overflows = sum(int(t.kept_overflow_t.sum()) for t in trajectories)
    values['rollout/kept_overflow_share'] = overflows / max(1, sum(lengths))
  greedy = [g.greedy.reward.value for g in groups if g.greedy and g.greedy.reward]
  scored = [value for value in greedy if value is not None]
  if scored:
    values['reward/greedy'] = sum(scored) / len(scored)
  parts: dict[str, list[float]] = {}
  for trajectory in trajectories:
    for name, part in (trajectory.reward.parts if trajectory.reward else {}).items():
      parts.setdefault(name, []).append(part)
  return values | {f'reward/{name}': sum(part) / len(part) for name, part in parts.items()}


def role_metrics(groups: Sequence[Group]) -> dict[str, float]:
  """Rewards and lengths of the other roles' samples of a batch, under `<role>/`; none where there is one role."""
  by_role: dict[str, list[Group]] = {}
  for other in (other for group in groups for other in group.others):
    by_role.setdefault(other.role, []).append(other)
  return {
    f'{role}/{name}': value
    for role, part in by_role.items()
    for name, value in batch_metrics(part, 0.0).items()
    if name != names.TOKENS_PER_S
  }


def _train_name(name: str, policy: str) -> str:
  return f'{policy}/train/{name}' if policy else f'train/{name}'


def _is_flat(group: Group) -> bool:
  return len({t.reward.value for t in group.trajectories if t.reward}) == 1


def _evaluation_metrics(result: Evaluation) -> dict[str, float]:
  values = {
    names.HELD_OUT: result.accuracy,
    'held_out/response_length': result.response_length,
    'held_out/failed': float(result.failed),
  }
  if result.vote is not None:
    values |= {f'held_out/{name}': value for name, value in result.vote._asdict().items()}
  return values | {f'held_out/pass@{k}': value for k, value in result.pass_at.items()}


def account_from(extras: dict[str, Any] | None) -> Account:
  """The account of a checkpoint, or a fresh one.

  Raises:
    CheckpointError: the checkpoint's account is malformed.
  """
  if extras is None:
    return Account()
  try:
    return Account(**extras['account'])
  except (KeyError, TypeError) as error:
    raise CheckpointError(
      f'the checkpoint has no readable account ({error!r}). Use an older one or another workdir.'
    ) from error
