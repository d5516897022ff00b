"""Several schedulers as one: each policy's samples are those that its weights give alone."""

import dataclasses

import numpy as np
import pytest

from rlax_stack.rollout.joint_scheduler import JointScheduler
from rlax_stack.rollout.scheduler import Scheduler


@pytest.fixture
def joint(tiny):
  schedulers = {name: Scheduler(tiny.engine(), run_seed=0) for name in ('', 'judge')}
  made = JointScheduler(schedulers)
  made.swap_prepared(made.prepare({'': tiny.params(0), 'judge': tiny.params(1)}), 0)
  return made


def test_every_request_goes_to_its_policy(tiny, joint):
  own = [tiny.request(3, index) for index in range(2)]
  judged = [dataclasses.replace(tiny.request(3, index + 2), policy='judge') for index in range(2)]
  for request in (*own, *judged):
    joint.submit(request)
  done = {}
  while joint.has_work:
    done |= {sample.request.sample_index: sample for sample in joint.step()}
  assert joint.num_running == 0 and joint.stats.finished_samples == 4
  for requests, seed in ((own, 0), (judged, 1)):
    alone = Scheduler(tiny.engine(), run_seed=0)
    alone.swap_params(tiny.params(seed), 0)
    for want in alone.generate_all(requests):
      got = done[want.request.sample_index]
      np.testing.assert_array_equal(got.tokens, want.tokens)
      np.testing.assert_allclose(
        got.raw_log_probs_t, tiny.sampled_log_probs(got, tiny.params(seed)), atol=1e-4
      )
  (first,) = joint.generate_all(own[:1])
  np.testing.assert_array_equal(first.tokens, done[0].tokens)
  assert joint.generate_all([]) == []
  with pytest.raises(ValueError, match="of several policies, \\['', 'judge'\\]"):
    joint.generate_all([own[0], judged[0]])


def test_versions_are_the_lowest_and_groups_end_everywhere(tiny, joint):
  assert (joint.version, joint.newest_version) == (0, 0)
  joint._schedulers['judge'].swap_params(tiny.params(1), 1)
  assert (joint.version, joint.newest_version) == (0, 0)
  joint.swap_prepared(joint.prepare({'': tiny.params(0), 'judge': tiny.params(1)}), 1)
  assert joint.version == 1 and joint.free_capacity == joint._schedulers[''].free_capacity
  for policy in ('', 'judge'):
    joint.submit(dataclasses.replace(tiny.request(4, len(policy)), policy=policy))
  assert {done.request.policy for done in joint.cancel(4)} == {'', 'judge'}
  assert not joint.has_work
  joint.warm_up()
  with pytest.raises(ValueError, match="policy '' is needed"):
    JointScheduler({'judge': joint._schedulers['judge']})
