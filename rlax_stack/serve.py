"""`python -m rlax_stack.serve --config=…`: a model behind an OpenAI-compatible endpoint that also speaks tokens.

    python -m rlax_stack.serve --config=configs/quickstart.py --checkpoint=runs/quickstart
    curl http://127.0.0.1:8000/v1/models

Without --checkpoint the model of the config is served as it is. docs/serving.md has the rest.
"""

from rlax_stack import huge_pages

if __name__ == '__main__':  # before anything large is imported
  huge_pages.restart_with_huge_pages()

import asyncio
import contextlib
import functools
import os
import pathlib
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from absl import flags, logging

from rlax_stack import assembly, command_line, sources
from rlax_stack.compile_cache import enable_compile_cache
from rlax_stack.config import RunConfig
from rlax_stack.errors import CheckpointError, ConfigError
from rlax_stack.learner.checkpoint import newest_step
from rlax_stack.models.load import LoadedModel, load_model
from rlax_stack.trained_weights import trained_weights


def make_endpoint(
  config: RunConfig, *, checkpoint: str | None, token: str | None
) -> tuple[Any, int]:
  """Loads and compiles what `config` and `checkpoint` name.

  Args:
    config: checked by config_rules.
    checkpoint: folder of a run, or of checkpoints; None serves the model as it is.
    token: what clients must show.

  Returns:
    An Endpoint (serving/endpoint.py) that is ready to run, and the version of its weights: the checkpoint's step, or 0.

  Raises:
    ConfigError: an address that is taken, or needs a token and has none, or packages that are missing.
    CheckpointError, ModelFileError: weights that cannot be read.
  """
  endpoint_lib = _endpoint_module()
  section, start_s = config.serve, time.monotonic()
  endpoint_lib.check_token(section.host, token, section.token_variable)
  if section.follow_s and checkpoint is None:
    raise ConfigError('config.serve.follow_s follows a run. Give --checkpoint, or set it to 0.')
  with contextlib.ExitStack() as undo:  # a taken port is told before a model is loaded
    listener = undo.enter_context(endpoint_lib.bind(section.host, section.port))
    model, params, version = _load(config, checkpoint)
    loaded_s = time.monotonic()
    scheduler = assembly.make_scheduler(config, model, serving=True)
    scheduler.swap_params(params, version)
    scheduler.warm_up()
    endpoint = endpoint_lib.Endpoint(
      scheduler,
      model=model.config,
      sizes=assembly.engine_sizes(config, serving=True),
      tokenizer=model.tokenizer,
      name=config.name,
      defaults=sources.train_sampling(config, model.tokenizer.stop_token_ids),
      section=section,
      token=token,
      listener=listener,
    )
    undo.pop_all()
  endpoint.metrics.model_load_time.set(loaded_s - start_s)
  endpoint.metrics.startup_latency.set(time.monotonic() - start_s)
  return endpoint, version


def _load(config: RunConfig, checkpoint: str | None) -> tuple[LoadedModel, Any, int]:
  """The model, the weights to serve and their version."""
  model = assembly.load_checked_model(config, {})
  if checkpoint is None:
    return model, model.params, 0
  directory = checkpoint_directory(checkpoint)
  version = newest_step(directory)
  return model, trained_weights(directory, lambda: model.params, version), version


def _endpoint_module() -> Any:
  try:
    from rlax_stack.serving import endpoint
  except ModuleNotFoundError as error:
    raise ConfigError(
      f"serving needs the package {error.name}. Run: pip install 'rlax-stack[serve]'."
    ) from error
  return endpoint


def checkpoint_directory(path: str) -> pathlib.Path:
  """The checkpoints of a run's folder, or the folder itself where it holds them directly."""
  folder = pathlib.Path(path)
  return folder / 'checkpoints' if (folder / 'checkpoints').is_dir() else folder


async def _run(
  endpoint: Any, following: Coroutine[Any, Any, None] | None, ready: Callable[[int], None]
) -> None:
  loop = asyncio.get_running_loop()
  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, endpoint.stop)
  task = asyncio.create_task(following) if following is not None else None
  try:
    await endpoint.run(ready)
  finally:
    if task is not None:
      task.cancel()


async def follow_checkpoints(
  bridge: Any,
  directory: pathlib.Path,
  version: int,
  *,
  load_model_params: Callable[[], Any],
  every_s: float,
) -> None:
  """Gives `bridge` (serving/bridge.py) every checkpoint of `directory` that is newer than `version`; for ever.

  `load_model_params` gives what an adapter belongs to.
  """
  while True:
    await asyncio.sleep(every_s)
    names = (path.name for path in directory.glob('*'))
    if not any(name.isdecimal() and int(name) > version for name in names):
      continue
    try:
      step = await asyncio.to_thread(newest_step, directory)  # which may not be committed yet
      if step > version:
        read = functools.partial(trained_weights, directory, load_model_params, step)
        bridge.swap_params(await asyncio.to_thread(read), step)
        version = step
    except CheckpointError as error:  # it may have been removed while it was read
      logging.warning('No newer weights: %s', error)


def main(argv: Sequence[str]) -> int:
  """The command; returns its exit status."""

  def define(values: flags.FlagValues) -> None:
    text = 'Folder of a run, or of checkpoints; the newest is served.'
    flags.DEFINE_string('checkpoint', None, text, flag_values=values)

  config, values = command_line.parse(argv, define)
  enable_compile_cache()
  checkpoint, section = values['checkpoint'].value, config.serve
  token = os.environ.get(section.token_variable) or None
  endpoint, version = make_endpoint(config, checkpoint=checkpoint, token=token)
  following = None
  if section.follow_s:  # make_endpoint has refused it without a checkpoint
    directory = checkpoint_directory(str(checkpoint))
    following = follow_checkpoints(
      endpoint.bridge,
      directory,
      version,
      # Held from the first adapter on; whole weights never ask for it.
      load_model_params=functools.cache(lambda: load_model(config.model.path).params),
      every_s=section.follow_s,
    )

  def ready(port: int) -> None:
    host = f'[{section.host}]' if ':' in section.host else section.host
    wire = f', gRPC on {host}:{section.grpc_port}' if section.grpc_port else ''
    print(f'Serving {config.name} (version {version}) on http://{host}:{port}/v1{wire}', flush=True)

  asyncio.run(_run(endpoint, following, ready))
  return 0


if __name__ == '__main__':
  command_line.run(main)
