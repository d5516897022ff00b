"""The staleness rule as pure functions: how many groups may be active, and which ones a batch must take.

One batch of `groups_per_batch` groups is consumed per version. A group whose oldest token was made by version w can be
consumed up to version w + max_staleness: its last version. Admission keeps, for every version d from now on,

    active groups with last version <= d   <=   places left in the batches up to d

and `choose` keeps it true while it prefers the groups that finished first. So every admitted group has a place in
time, however slow it is, and drops at consumption are left for workers that break the rule.
"""

from collections.abc import Mapping, Sequence


def capacity(
  *, version: int, next_batch_version: int, max_staleness: int, groups_per_batch: int
) -> int:
  """Groups that may be active (leased or ready): the places in the batches up to version + max_staleness."""
  return max(0, version + max_staleness - next_batch_version + 1) * groups_per_batch


def choose(
  ready: Sequence[int],
  last_versions: Mapping[int, int],
  *,
  version: int,
  max_staleness: int,
  groups_per_batch: int,
) -> list[int] | None:
  """Groups of the batch for `version`, or None while it must wait.

  Args:
    ready: delivered group ids in order of completion, each with last version >= version.
    last_versions: last version of every active group, the leased ones included.
    version: the learner's version.
    max_staleness: in versions, >= 0.
    groups_per_batch: size of a batch.

  Returns:
    groups_per_batch group ids in ascending order, or None: too few are ready, or a group that cannot wait for a later
    batch is still being generated.
  """
  if len(ready) < groups_per_batch:
    return None
  chosen: list[int] = []
  for last in range(version, version + max_staleness + 1):
    due = sum(version <= other <= last for other in last_versions.values())
    required = min(groups_per_batch, due - (last - version) * groups_per_batch)
    candidates = [i for i in ready if last_versions[i] <= last and i not in chosen]
    missing = max(0, required - len(chosen))
    if len(candidates) < missing:
      return None
    chosen += candidates[:missing]
  rest = [i for i in ready if i not in chosen]
  return sorted(chosen + rest[: groups_per_batch - len(chosen)])
