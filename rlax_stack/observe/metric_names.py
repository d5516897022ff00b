"""The names of the metrics that the display and the report know; others are recorded as they come.

Not a registry: a metric needs no entry here to be written. Invariant: one name means one quantity
and unit.
"""

REWARD = 'reward/mean'  # mean reward of the step's trajectories
HELD_OUT = 'held_out/accuracy'  # 0 .. 1, problems that never occur in training
RESPONSE_LENGTH = 'rollout/response_length'  # sampled tokens per trajectory, mean
ENTROPY = 'train/entropy'  # nats per trained token, mean
TOKENS_PER_S = 'perf/tokens_per_s'  # sampled tokens per second of wall time
STEP_TIME_S = 'perf/step_time_s'  # wall seconds of the step
STALENESS = 'fleet/staleness'  # learner version - oldest trained version, mean
TIME = 'time/'  # + part: fraction of the step's wall time, 0 .. 1 (see MEASURED)
IDLE = 'perf/learner_idle'  # fraction of the step in which the learner waited for a batch

PARTS = (
  'generate',
  'score',
  'train',
  'publish',
  'checkpoint',
)  # parts of a step that the display shows
# Those of every step; `other` is what is left. Together they are the step.
MEASURED = (*PARTS, 'data', 'log_probs', 'evaluate', 'other')


def time_values(fractions: dict[str, float]) -> dict[str, float]:
  """`{'train': 0.3}` becomes `{'time/train': 0.3}`."""
  return {TIME + name: value for name, value in fractions.items()}
