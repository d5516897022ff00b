"""Starts the process again with malloc asking the kernel for huge pages, where that is off by default.

The arrays of a step are hundreds of megabytes. In pages of 4 KiB they cost a page fault each time they are allocated,
and a TLB miss wherever they are read; with pages of 2 MiB decode on the CPU is about a tenth quicker. glibc reads the
setting when a process starts, so the process replaces itself, once, before anything large is imported.
"""

import os
import pathlib
import platform
import sys

_TUNABLE = 'glibc.malloc.hugetlb'
_SETTING = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
_LEAST_GLIBC = (2, 35)  # the first that knows the tunable


def restart_with_huge_pages() -> None:
  """Replaces this process by itself with GLIBC_TUNABLES set; does nothing where that would not help."""
  tunables = environment_for(os.environ, _read_setting(), platform.libc_ver())
  if tunables is None:
    return
  os.environ['GLIBC_TUNABLES'] = tunables
  os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def environment_for(
  environment: os._Environ[str] | dict[str, str], setting: str, libc: tuple[str, str]
) -> str | None:
  """The value GLIBC_TUNABLES should have, or None where nothing is to be done.

  Args:
    environment: of the process; a tunable that is set already, to whatever value, is left alone.
    setting: what the kernel says of transparent huge pages, such as 'always [madvise] never'.
    libc: name and version, as platform.libc_ver() gives them.
  """
  tunables = environment.get('GLIBC_TUNABLES', '')
  if '[madvise]' not in setting or _TUNABLE in tunables or libc[0] != 'glibc':
    return None
  version = tuple(int(part) for part in libc[1].split('.')[:2] if part.isdigit())
  if version < _LEAST_GLIBC:
    return None
  return ':'.join(part for part in (tunables, f'{_TUNABLE}=1') if part)


def _read_setting() -> str:
  try:
    return _SETTING.read_text()
  except OSError:  # no Linux, or a kernel without them
    return ''
