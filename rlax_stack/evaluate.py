"""`python -m rlax_stack.evaluate --config=…`: accuracy, pass@k and votes of a model, or of a trained run.

    python -m rlax_stack.evaluate --config=configs/quickstart.py --run=runs/quickstart \\
        --config.eval.samples=8 --config.eval.pass_at='(1,4,8)'

The prompts are those of config.data.eval, the verifiers those of config.rewards. Without --run the
model of the config is evaluated as it is. The last line is JSON.
"""

from rlax_stack import huge_pages

if __name__ == '__main__':  # before anything large is imported
  huge_pages.restart_with_huge_pages()

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from absl import flags

from rlax_stack import assembly, command_line, sources
from rlax_stack.compile_cache import enable_compile_cache
from rlax_stack.config import RunConfig
from rlax_stack.errors import CheckpointError
from rlax_stack.evaluation import Evaluation, evaluate_groups
from rlax_stack.models.load import LoadedModel
from rlax_stack.trained_weights import trained_weights


def evaluate(config: RunConfig, *, run: str | None = None) -> Evaluation:
  """Samples and verifies the held-out prompts of a config.

  Args:
    config: checked by config_rules.
    run: folder of a run whose newest checkpoint holds the weights; None takes the model's own.

  Raises:
    DataError, ModelFileError, PromptTooLongError: what is read is missing or does not fit.
    CheckpointError: `run` has no checkpoint that can be read.
    RewardError: no sample could be verified.
  """
  held_out = sources.make_source(config.data.eval)
  model = assembly.load_checked_model(config, {'eval': held_out})
  if run is not None:
    model = _with_weights_of(model, pathlib.Path(run))
  scheduler = assembly.make_scheduler(config, model)
  scheduler.swap_params(model.params, 0)
  with sources.make_chain(config.rewards) as chain:
    groups = assembly.held_out_groups(config, model, chain, held_out, scheduler.generate_all)
  return evaluate_groups(
    groups,
    label=next(iter(config.rewards.verifiers)),
    correct_at=config.eval.correct_at,
    pass_at=config.eval.pass_at,
    vote=config.eval.vote,
  )


def _with_weights_of(model: LoadedModel, run: pathlib.Path) -> LoadedModel:
  if not run.is_dir():
    raise CheckpointError(f'there is no run folder {str(run)!r}. Give for example runs/quickstart.')
  params = trained_weights(run / 'checkpoints', lambda: model.params)
  return dataclasses.replace(model, params=params)


def main(argv: Sequence[str]) -> int:
  """The command; returns its exit status."""

  def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string('run', None, 'Folder of a run to evaluate.', flag_values=values)

  config, values = command_line.parse(argv, define)
  enable_compile_cache()
  result = evaluate(config, run=values['run'].value)
  print(f'{result.num_samples} samples, {result.failed} without a verdict')
  print(f'accuracy: {result.accuracy:.4f}')
  for k, value in result.pass_at.items():
    print(f'pass@{k}: {value:.4f}')
  if result.vote is not None:
    count = config.eval.samples
    print(f'maj@{count}: {result.vote.majority:.4f}')
    print(f'weighted maj@{count}: {result.vote.weighted:.4f}')
    print(f'best of {count} by log-prob: {result.vote.best_of_n:.4f}')
  plain = result._asdict() | {'pass_at': {str(k): v for k, v in result.pass_at.items()}}
  plain['vote'] = result.vote and result.vote._asdict()
  print(json.dumps(plain))
  return 0


if __name__ == '__main__':
  command_line.run(main)
