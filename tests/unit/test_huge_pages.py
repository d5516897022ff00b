"""Restarting with huge pages: when it is due, and that the program then runs with the setting, once."""

import os
import subprocess
import sys

import pytest

from rlax_stack import huge_pages

_MADVISE = 'always [madvise] never'
_GLIBC = ('glibc', '2.36')


def test_the_tunable_is_added_to_those_that_are_set():
  assert huge_pages.environment_for({}, _MADVISE, _GLIBC) == 'glibc.malloc.hugetlb=1'
  others = {'GLIBC_TUNABLES': 'glibc.malloc.perturb=1'}
  expected = 'glibc.malloc.perturb=1:glibc.malloc.hugetlb=1'
  assert huge_pages.environment_for(others, _MADVISE, _GLIBC) == expected


@pytest.mark.parametrize(
  ('environment', 'setting', 'libc'),
  [
    ({'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=0'}, _MADVISE, _GLIBC),
    ({}, '[always] madvise never', _GLIBC),
    ({}, 'always madvise [never]', _GLIBC),
    ({}, '', _GLIBC),
    ({}, _MADVISE, ('glibc', '2.31')),
    ({}, _MADVISE, ('', '')),
  ],
)
def test_nothing_is_done_where_it_is_set_or_would_not_help(environment, setting, libc):
  assert huge_pages.environment_for(environment, setting, libc) is None


def test_the_program_starts_again_once_with_its_arguments(tmp_path):
  program = tmp_path / 'program.py'
  program.write_text(
    'import os, sys\n'
    'from rlax_stack import huge_pages\n'
    "huge_pages._read_setting = lambda: 'always [madvise] never'\n"
    "huge_pages.platform.libc_ver = lambda: ('glibc', '2.36')\n"
    "print('started', flush=True)\n"
    'huge_pages.restart_with_huge_pages()\n'
    "print(os.environ['GLIBC_TUNABLES'], *sys.argv[1:])\n"
  )
  environment = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
  environment['PYTHONPATH'] = os.pathsep.join(sys.path)
  out = subprocess.run(
    [sys.executable, str(program), '--a=b c', ''],
    env=environment,
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  assert out.stdout.splitlines() == ['started', 'started', 'glibc.malloc.hugetlb=1 --a=b c ']
