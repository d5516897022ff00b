"""One process of the learner that test_two_processes.py starts: trains, saves, restores, and loses its other half.

python learner_process.py FOLDER alone
python learner_process.py FOLDER INDEX ADDRESS
"""

import json
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from rlax_stack.errors import FleetError
from rlax_stack.learner import multihost
from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.learner.learner import Learner
from rlax_stack.learner.optimizer import OptimizerSettings
from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings
from rlax_stack.learner.settings import LearnerSettings
from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.objectives.objective import resolve
from rlax_stack.sharding import make_mesh, sharding_for
from rlax_stack.types import FinishReason, Group, Prompt, Reward, Source, Trajectory

DEADLINE_S = 5
_METRICS = ('loss', 'grad_norm', 'entropy', 'trained_tokens')
MODEL = ModelConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=32,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)
SETTINGS = LearnerSettings(
  rows=RowPlan(shape=RowShape(128, 64), micro_batch_rows=4, max_micro_batches=2),
  forward=ForwardSettings(compute_dtype=jnp.float32),
  objective=resolve(corrections=()),
  optimizer=OptimizerSettings(learning_rate=1e-2),
  meeting_deadline_s=DEADLINE_S,
)


def _trajectory(rng, group, number, prompt):
  tokens = np.concatenate([prompt, rng.integers(0, 32, rng.integers(3, 9))]).astype(np.int32)
  sampled = np.arange(len(tokens)) >= len(prompt)
  log_probs = np.where(sampled, -rng.exponential(3.0, len(tokens)), 0.0).astype(np.float32)
  return Trajectory(
    group_id=group,
    sample_index=number,
    prompt_id=f'p{group}',
    tokens=tokens,
    source_t=np.where(sampled, Source.POLICY, Source.PROMPT).astype(np.int8),
    mask_t=sampled,
    behaviour_log_probs_t=log_probs,
    raw_log_probs_t=log_probs,
    version_t=np.where(sampled, 0, -1).astype(np.int32),
    finish_reason=FinishReason.STOP,
    reward=Reward(value=float(number)),
  )


def _groups():
  rng = np.random.default_rng(0)
  groups = []
  for number in range(6):
    prompt = rng.integers(0, 32, 50 + number).astype(np.int32)
    trajectories = tuple(_trajectory(rng, number, i, prompt) for i in range(4))
    task = Prompt(prompt_id=f'p{number}', messages=(), answer='')
    group = Group(group_id=number, prompt=task, prompt_tokens=prompt, trajectories=trajectories)
    groups.append(group)
  return groups


def _learner():
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda leaf: (0.4 * rng.standard_normal(leaf.shape)).astype(np.float32),
    decoder.abstract_params(MODEL),
  )
  return Learner(MODEL, params, SETTINGS, make_mesh({'data': 2, 'fsdp': 2, 'context': 2}))


def _own_rows_alone(index):
  """Rows that each process knows a half of, placed and fetched; the half it does not know is NaN here."""
  x = np.arange(4 * 6, dtype=np.float32).reshape(4, 6)
  known = np.full_like(x, np.nan)
  known[2 * index : 2 * index + 2] = x[2 * index : 2 * index + 2]
  mesh = make_mesh({'data': 2, 'fsdp': 2, 'context': 2})
  placed = multihost.place({'x': known}, sharding_for(mesh, ('rows',)))['x']
  return bool((multihost.fetch(placed) == x).all())


def _trained(learner, groups):
  metrics = [learner.train(groups).result() for _ in range(2)]
  scores = learner.score(groups)
  return {
    'metrics': [{name: m[name] for name in _METRICS} for m in metrics],
    'scores': [float(np.sum(score)) for of_group in scores for score in of_group],
    'weights': [float(np.abs(multihost.fetch(x)).sum()) for x in jax.tree.leaves(learner.params)],
  }


def _restored(learner, folder):
  """Whether a checkpoint that all processes wrote comes back bit for bit, onto a fresh learner."""
  checkpointer = Checkpointer(folder / 'checkpoints')
  checkpointer.save(2, learner.state, {'note': 'both'})
  checkpointer.wait()
  found = checkpointer.restore_latest(learner.abstract_state())
  pairs = zip(jax.tree.leaves(found.state), jax.tree.leaves(learner.state), strict=True)
  same = all((multihost.fetch(a) == multihost.fetch(b)).all() for a, b in pairs)
  checkpointer.close()
  return bool(same) and found.extras == {'note': 'both'}


def _refusal(act):
  begun = time.monotonic()
  try:
    act()
  except FleetError as error:
    return {'error': str(error), 'after_s': time.monotonic() - begun}
  return {'error': '', 'after_s': time.monotonic() - begun}


def _die_in_a_step(learner, groups):
  """Comes to the meeting before the step, so that the other process enters it, and is killed."""
  meet = multihost.meet

  def meet_and_die(*args, **named):
    meet(*args, **named)
    os.kill(os.getpid(), signal.SIGKILL)

  multihost.meet = meet_and_die
  learner.train(groups)


def main(folder, who, address=''):
  """Writes what it saw to FOLDER/WHO.json; process 1 of two then kills itself."""
  if who != 'alone':
    multihost.start(address, processes=2, index=int(who), deadline_s=10)
  learner, groups = _learner(), _groups()
  report = _trained(learner, groups)
  if who != 'alone':
    report['own_rows'] = _own_rows_alone(int(who))
    report['restored'] = _restored(learner, folder)
    other = groups if who == '0' else groups[::-1]
    report['other_batch'] = _refusal(lambda: learner.train(other))
    if who == '1':
      time.sleep(DEADLINE_S + 1)
    report['late'] = _refusal(lambda: learner.train(groups))
  path = folder / f'{who}.json'
  path.write_text(json.dumps(report))
  if who == '1':
    _die_in_a_step(learner, groups)
  if who == '0':
    report['alone'] = _refusal(lambda: learner.train(groups).result())
    path.write_text(json.dumps(report))


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
