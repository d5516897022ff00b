"""Keeps compiled programs on disk, so that a second start of the same run compiles nothing."""

import os
import pathlib

import jax


def enable_compile_cache() -> pathlib.Path | None:
  """Turns JAX's persistent cache on, in the user's cache folder.

  The folder is JAX_COMPILATION_CACHE_DIR where that is set (empty turns the cache off), else
  rlax_stack/xla in XDG_CACHE_HOME or ~/.cache.

  Returns:
    The folder, or None where the cache stays off.
  """
  chosen = os.environ.get('JAX_COMPILATION_CACHE_DIR')
  if chosen == '':
    return None
  home = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache')
  folder = pathlib.Path(chosen) if chosen else home / 'rlax_stack' / 'xla'
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:  # a read-only home: compile every time
    return None
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  return folder
