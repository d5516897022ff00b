"""The staleness rule: how many groups may be active, and which ones a batch must take.

One batch of `groups_per_batch` groups is consumed per version. A group whose oldest token was made by version w can be
consumed up to version w + max_staleness: its last version. Admission keeps, for every version d from now on,

    active groups with last version <= d   <=   places left in the batches up to d

and `choose` keeps it true while it prefers the groups that finished first. So every admitted group has a place in
time, however slow it is, and drops at consumption are left for workers that break the rule.
"""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionRule:
  """Sizes of the rule; pure.

  With max_staleness above 0 more groups are active than a batch holds: the slow ones are carried over to a later batch
  while the fast ones fill this one. `groups_in_flight` bounds how many, so that few samples grow old for the sake of
  the slow ones; 0 admits all that can be consumed in time.

  Raises:
    ValueError: sizes that cannot work.
  """

  groups_per_batch: int
  max_staleness: int  # in versions; 0 is strictly on-policy
  groups_in_flight: int = 0  # active groups at most

  def __post_init__(self) -> None:
    if self.groups_per_batch < 1 or self.max_staleness < 0:
      raise ValueError(f'Need groups_per_batch >= 1 and max_staleness >= 0, got {self}.')
    most = self.groups_per_batch * (self.max_staleness + 1)
    if self.groups_in_flight and not self.groups_per_batch <= self.groups_in_flight <= most:
      raise ValueError(
        f'groups_in_flight must be 0 or from groups_per_batch={self.groups_per_batch} to '
        f'groups_per_batch x (max_staleness + 1) = {most}, got {self.groups_in_flight}.'
      )

  def capacity(self, *, version: int, next_batch_version: int) -> int:
    """Groups that may be active (leased or ready): the places in the batches up to version + max_staleness."""
    batches = max(0, version + self.max_staleness - next_batch_version + 1)
    places = batches * self.groups_per_batch
    return min(places, self.groups_in_flight or places)

  def choose(
    self, ready: Sequence[int], last_versions: Mapping[int, int], *, version: int
  ) -> list[int] | None:
    """Groups of the batch for `version`, or None while it must wait.

    Args:
      ready: delivered group ids in order of completion, each with last version >= version.
      last_versions: last version of every active group, the leased ones included.
      version: the learner's version.

    Returns:
      groups_per_batch group ids in ascending order, or None: too few are ready, or a group that cannot wait for a later
      batch is still being generated.
    """
    size = self.groups_per_batch
    if len(ready) < size:
      return None
    chosen: list[int] = []
    for last in range(version, version + self.max_staleness + 1):
      due = sum(version <= other <= last for other in last_versions.values())
      required = min(size, due - (last - version) * size)
      candidates = [i for i in ready if last_versions[i] <= last and i not in chosen]
      missing = max(0, required - len(chosen))
      if len(candidates) < missing:
        return None
      chosen += candidates[:missing]
    rest = [i for i in ready if i not in chosen]
    return sorted(chosen + rest[: size - len(chosen)])
