"""The process behind `ProcessPool`: reads one JSON task a line, writes one JSON reply a line.

Not for importing elsewhere: it is run as `python -m rlax_stack.rewards.pool_worker`. It imports no jax and, until
asked, nothing large. Invariant: replies go through a private descriptor; whatever a grader prints is thrown away,
so it can neither spoil nor forge a reply.
"""

import argparse
import json
import os
import resource
import signal
import sys

from rlax_stack.rewards import pool_tasks


def main() -> None:
  """Serves tasks until standard input closes."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--memory-bytes', type=int, required=True)
  parser.add_argument('--preload', default='')
  options = parser.parse_args()
  replies = _private_replies()
  try:
    for name in filter(None, options.preload.split(',')):
      pool_tasks.preload(name)
  except ImportError as error:
    _send(replies, {'fatal': str(error)})
    return
  _limit(options.memory_bytes)
  _send(replies, {'ready': True})
  for line in sys.stdin.buffer:
    request = json.loads(line)
    # If the parent is gone, nobody kills a task that never ends; then the kernel's alarm does.
    signal.alarm(request['alarm_s'])
    reply = _answer(request)
    signal.alarm(0)
    _send(replies, reply)


def _private_replies() -> int:
  """A duplicate of standard output to answer on; standard output itself goes nowhere from here on."""
  replies = os.dup(1)
  nowhere = os.open(os.devnull, os.O_WRONLY)
  os.dup2(nowhere, 1)
  os.dup2(nowhere, 2)
  return replies


def _limit(memory_bytes: int) -> None:
  resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # graders write no files


def _answer(request: dict) -> dict:
  try:
    value = pool_tasks.TASKS[request['kind']](request['payload'])
    return {'id': request['id'], 'value': value}
  except Exception as error:  # a grader may raise anything; the parent counts it by this message
    return {'id': request['id'], 'error': f'{type(error).__name__}: {str(error)[:200]}'}


def _send(replies: int, message: dict) -> None:
  data = json.dumps(message).encode() + b'\n'
  while data:
    data = data[os.write(replies, data) :]


if __name__ == '__main__':
  main()
