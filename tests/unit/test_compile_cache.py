"""Where compiled programs are kept."""

import jax
import pytest

from rlax_stack.compile_cache import enable_compile_cache


@pytest.fixture(autouse=True)
def restore():
  names = ('jax_compilation_cache_dir', 'jax_persistent_cache_min_compile_time_secs')
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def test_folder_follows_the_environment(monkeypatch, tmp_path):
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  folder = enable_compile_cache()
  assert folder == tmp_path / 'rlax_stack' / 'xla' and folder.is_dir()
  assert jax.config.jax_compilation_cache_dir == str(folder)
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'own'))
  assert enable_compile_cache() == tmp_path / 'own'


def test_cache_can_be_off(monkeypatch, tmp_path):
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', '')
  assert enable_compile_cache() is None
  blocked = tmp_path / 'file'
  blocked.write_text('')
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(blocked / 'below'))
  assert enable_compile_cache() is None
