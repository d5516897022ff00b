"""`python -m rlax_stack.launch --config=configs/quickstart.py --config.key=value --workdir=runs`.

Trains, or goes on where the same command was interrupted. Parts are built in order of cost, so that
a mistake in the config, the data or the model's files is told before a device is touched.
"""

from rlax_stack import huge_pages

if __name__ == '__main__':  # before anything large is imported
  huge_pages.restart_with_huge_pages()

import contextlib
import shlex
from collections.abc import Sequence
from typing import Any

import jax

from rlax_stack import assembly, command_line, other_models, role_assembly, sources
from rlax_stack.compile_cache import enable_compile_cache
from rlax_stack.compile_counter import CompileCounter
from rlax_stack.config import RunConfig, to_plain
from rlax_stack.fleet.local_runtime import LocalRuntime
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.learner.adapter_identity import check_identity
from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.objective_rules import resolve_objective
from rlax_stack.observe.metrics import Metrics, open_metrics
from rlax_stack.observe.progress import Progress
from rlax_stack.observe.progress_view import final_line
from rlax_stack.observe.report import write_report
from rlax_stack.observe.rollouts_writer import RolloutsWriter
from rlax_stack.observe.run_folder import RunFolder
from rlax_stack.profiling import StepTraces
from rlax_stack.role_config import policy_of_role
from rlax_stack.stop_signal import StopSignal
from rlax_stack.train_loop import Account, LoopParts, TrainLoop, account_from


def main(argv: Sequence[str]) -> int:
  """Parses the command line and runs it; returns the exit status."""
  config, values = command_line.parse(argv)
  folder = RunFolder(str(values['workdir'].value), config.name)
  return train(config, folder, command=argv[1:])


def train(config: RunConfig, folder: RunFolder, *, command: Sequence[str]) -> int:
  """Runs `config` in `folder` to its end, or to a signal.

  Args:
    config: checked by config_rules.
    folder: not yet created.
    command: the arguments to type again, for the message that says how to resume.

  Returns:
    0, or 128 + the signal that stopped the run.
  """
  prompts, objective = assembly.make_prompts(config), resolve_objective(config)
  folder.create(
    to_plain(config),
    allow_changes=config.checkpoint.allow_changes,
    free_keys=assembly.free_keys(config),
    force_hint='set --config.checkpoint.allow_changes=True',
  )
  with contextlib.ExitStack() as stack:
    stack.callback(folder.close)
    (folder.path / 'objective.txt').write_text(f'{objective.formula}\n', encoding='utf-8')
    progress = stack.enter_context(
      Progress(total_steps=config.steps, title=_title(config), mode=config.observe.progress)
    )
    stop = stack.enter_context(
      StopSignal(lambda name: progress.message(f'{name}: stopping after this step and saving.'))
    )
    progress.message(objective.formula)
    enable_compile_cache()
    loop, finished = _run(config, folder, prompts, progress, stop, stack)
  if finished:
    _finish(config, folder, loop.account)
  else:
    again = shlex.join(command)
    print(
      f'Saved at step {loop.step} of {config.steps}. To go on: python -m rlax_stack.launch {again}'
    )
  return stop.exit_code


def _run(
  config: RunConfig,
  folder: RunFolder,
  prompts: assembly.Prompts,
  progress: Progress,
  stop: StopSignal,
  stack: contextlib.ExitStack,
) -> tuple[TrainLoop, bool]:
  """Builds the parts, restores what was saved, and trains."""
  counter = stack.enter_context(CompileCounter())
  chain = stack.enter_context(sources.make_chain(config.rewards))
  chain.start()
  progress.phase(f'loading {config.model.path}')
  model = assembly.load_checked_model(config, {'train': prompts.train, 'eval': prompts.held_out})
  models = role_assembly.policy_models(config, model)
  model = models['']
  progress.phase('building the learner')
  learner = role_assembly.make_learner(config, models)
  checkpointer = Checkpointer(folder.checkpoints_dir, keep=config.checkpoint.keep)
  stack.callback(checkpointer.close)
  coordinator = role_assembly.make_coordinator(config, prompts.iterator)
  account = _restore(config, checkpointer, learner, coordinator, prompts, progress)
  restored_step = learner.version or -1
  metrics = stack.enter_context(_open_metrics(config, folder, restored_step))
  server = ParameterServer()
  worker = role_assembly.make_worker(config, models, chain)
  traces = StepTraces(folder.path / 'profile', config.profile.steps)
  stack.callback(traces.close)
  runtime = LocalRuntime(worker, coordinator=coordinator, parameter_server=server)
  parts = LoopParts(
    learner=learner,
    coordinator=coordinator,
    parameter_server=server,
    checkpointer=checkpointer,
    metrics=metrics,
    rollouts=RolloutsWriter(
      folder.samples_dir,
      max_per_step=config.observe.samples_per_step,
      restored_step=restored_step,
    ),
    progress=progress,
    compile_counter=counter,
    warm_up=lambda: worker.warm_up(server.latest()),
    evaluate=lambda: assembly.held_out_groups(
      config,
      model,
      chain,
      prompts.held_out,
      lambda requests: worker.generate_all(requests, server.latest()),
    ),
    score_seconds=lambda: worker.stats.score_s,
    engine_figures=worker.figures,
    utilisation=role_assembly.make_utilisation(config, models, jax.devices()[0].device_kind),
    traces=traces,
    stop_requested=lambda: stop.received is not None,
    roles=policy_of_role(config),
  )
  loop = TrainLoop(config, parts, account)
  with runtime:
    finished = loop.run()
  return loop, finished


def _open_metrics(config: RunConfig, folder: RunFolder, restored_step: int) -> Metrics:
  return open_metrics(
    jsonl_path=folder.metrics_path,
    tensorboard_dir=folder.tensorboard_dir if config.observe.tensorboard else None,
    restored_step=restored_step,
  )


def _restore(
  config: RunConfig,
  checkpointer: Checkpointer,
  learner: Any,
  coordinator: Any,
  prompts: assembly.Prompts,
  progress: Progress,
) -> Account:
  """Takes up the newest checkpoint and its account, or a fresh start with a critic to warm it."""
  here = learner.adapter_identity  # now: at the first save it would be a compilation amid the steps
  restored = checkpointer.restore_latest(learner.abstract_state())
  if restored is None:
    source = other_models.warm_start(config, learner)
    if source:
      progress.message(f'critic taken over from {source}')
    return Account()
  if here is not None:
    check_identity(restored.extras.get('adapter'), here, f'checkpoint step {restored.step}')
  learner.restore(restored.state, restored.extras.get('objective'))
  prompts.iterator.set_state(restored.extras['coordinator']['prompt_state'])
  coordinator.restore(restored.extras['coordinator'])
  progress.message(f'resumed at step {learner.version}')
  return account_from(restored.extras)


def _title(config: RunConfig) -> str:
  source = config.data.train
  task = source.task if source.kind == 'reasoning_gym' else source.kind
  return f'{config.name}: {config.model.path} on {task}'


def _finish(config: RunConfig, folder: RunFolder, account: Account) -> None:
  """Report and the last line, which says what was achieved."""
  minutes = account.train_seconds / 60
  headline = final_line(account.held_out_before, account.held_out_after, minutes)
  if config.observe.report:
    report = write_report(
      folder,
      title=_title(config),
      headline=headline,
      figures={
        'held-out accuracy before': account.held_out_before,
        'held-out accuracy after': account.held_out_after,
        'training minutes': round(minutes, 2),
        'steps': config.steps,
      },
    )
    for path in (report.picture, report.page):
      if path is not None:
        print(path)
  print(headline)


if __name__ == '__main__':
  command_line.run(main)
