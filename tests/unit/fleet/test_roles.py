"""Leases whose samples belong to roles: groups by role and prompt, and an account that closes."""

import dataclasses

import pytest

from rlax_stack.errors import FleetError
from rlax_stack.fleet import delivery
from rlax_stack.types import Prompt

SIZES = {'': 2, 'verifier': 2}


@pytest.fixture
def coordinator(make_coordinator):
  made = make_coordinator(group_size=7, groups_per_batch=1, min_group_size=SIZES, max_staleness=1)
  made.on_published(0)
  return made


@pytest.fixture
def deliver(make_trajectory):
  """Function (coordinator, failed indices, versions) that leases 3 answers and 2 verdicts on each of two of them."""

  def run(coordinator, failed=(), versions=()):
    lease = coordinator.lease('w')
    made = []
    for index in range(7):
      judged = (index - 3) // 2
      fields = {}
      if index >= 3:
        asked = Prompt(prompt_id=f'{lease.prompt.prompt_id}/{judged}', messages=(), answer='')
        fields = {'role': 'verifier', 'asked': asked}
      trajectory = make_trajectory(
        lease,
        index,
        prompt=(7, 8) if index < 3 else (9, judged),
        failure='x' if index in failed else None,
        versions=dict(versions).get(index),
      )
      made.append(dataclasses.replace(trajectory, **fields))
    coordinator.deliver(lease, made[::-1])
    return made

  return run


def test_a_batch_holds_the_groups_of_every_role(coordinator, deliver):
  made = deliver(coordinator)
  (visit,) = coordinator.next_batch(0, timeout_s=0.0)
  assert [t.sample_index for t in visit.trajectories] == [0, 1, 2] and visit.role == ''
  assert [other.prompt.prompt_id for other in visit.others] == ['0/0', '0/1']
  assert [other.prompt_tokens.tolist() for other in visit.others] == [[9, 0], [9, 1]]
  assert [[t.sample_index for t in o.trajectories] for o in visit.others] == [[3, 4], [5, 6]]
  assert visit.of_all_roles == (visit, *visit.others)
  assert {id(t) for t in delivery.all_trajectories([visit])} == {id(t) for t in made}
  coordinator.mark_filtered(list(visit.others))
  with pytest.raises(FleetError, match='already ended'):
    coordinator.mark_filtered(list(visit.others))
  coordinator.mark_trained([visit])
  counts = coordinator.counts()
  assert (counts['trained'], counts['dropped_filtered'], counts['in_flight']) == (3, 4, 0)
  coordinator.check()


def test_a_group_of_a_role_that_is_too_small_is_left_out(coordinator, deliver):
  deliver(coordinator, failed=(0, 3))
  (visit,) = coordinator.next_batch(0, timeout_s=0.0)
  assert [t.sample_index for t in visit.trajectories] == [1, 2]
  assert [[t.sample_index for t in o.trajectories] for o in visit.others] == [[5, 6]]
  coordinator.mark_trained([*visit.others])
  coordinator.mark_trained([visit])
  counts = coordinator.counts()
  assert (counts['trained'], counts['dropped_failed'], counts['in_flight']) == (4, 3, 0)
  coordinator.check()


@pytest.mark.parametrize('failed', [(0, 1), (3, 5)])
def test_a_lease_without_a_whole_role_is_dropped(coordinator, deliver, failed):
  deliver(coordinator, failed=failed)
  assert coordinator.counts()['dropped_failed'] == 7
  assert coordinator.metrics()['fleet/groups_dropped_too_few_usable'] == 1
  coordinator.check()


def test_staleness_is_of_the_oldest_token_of_any_role(coordinator, deliver):
  deliver(coordinator)
  first = coordinator.next_batch(0, timeout_s=0.0)
  deliver(coordinator, versions=[(6, [0, 1])])
  coordinator.mark_trained([other for visit in first for other in visit.others])
  coordinator.mark_trained(first)
  coordinator.on_published(1)
  coordinator.next_batch(1, timeout_s=0.0)
  assert coordinator.metrics()['fleet/staleness_max'] == 1


def test_samples_of_one_role_and_prompt_start_alike(coordinator, make_trajectory):
  lease = coordinator.lease('w')
  asked = Prompt(prompt_id='a', messages=(), answer='')
  made = [make_trajectory(lease, index, prompt=(7, index)) for index in range(7)]
  made = [dataclasses.replace(t, role='verifier', asked=asked) for t in made]
  with pytest.raises(FleetError, match='do not start with the same prompt tokens'):
    coordinator.deliver(lease, made)
