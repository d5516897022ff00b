"""Prints the golden values of the objectives: numpy float64, gradients by central differences.

Written from the formulas, without the code under test; `python
tests/unit/objectives/golden_losses.py` prints what `test_golden_losses.py` holds as constants, and
a test compares the two. A loss is a function of the log-probs and of their copy that is held.
"""

import numpy as np

MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0]], bool)
P = -50.0  # what masked places hold
CURRENT = np.array(
  [[-0.5, -1, -0.2, P], [-0.7, -0.3, -1.5, -0.4], [-0.1, P, -2, -0.6], [-1.6, -1.2, P, P]]
)
PROXIMAL = np.array(
  [[-0.6, -0.7, -0.2, P], [-0.5, -0.6, -1.4, -0.9], [-0.5, P, -1.6, -0.7], [-1.3, -1.2, P, P]]
)
BEHAVIOUR = np.array(
  [[-0.55, -0.9, -0.25, P], [-0.5, -0.5, -1.9, -0.9], [-0.45, P, -1.7, -0.6], [-1.3, -1.1, P, P]]
)
ANCHOR = np.array(
  [[-0.6, -0.9, -0.3, P], [-0.8, -0.3, -1.2, -0.5], [-0.2, P, -1.8, -0.6], [-1, -1, P, P]]
)
REWARDS = np.array([1.0, 0.0, 1.0, 0.5])
GROUPS = np.array([0, 0, 1, 1])
N = MASK.sum(1)


def advantages(kind: str) -> np.ndarray:
  """Advantages of the four sequences, float64 [4]."""
  out = np.zeros(4)
  spread = np.sqrt(((REWARDS - REWARDS.sum() / 4) ** 2).sum() / 3)
  for group in (0, 1):
    member = GROUPS == group
    rewards = REWARDS[member]
    centred = rewards - rewards.mean()
    if kind == 'group_std':
      centred = centred / (np.sqrt((centred**2).sum() / (len(rewards) - 1)) + 1e-6)
    if kind == 'group_std(ddof=0)':
      centred = centred / (np.sqrt((centred**2).sum() / len(rewards)) + 1e-6)
    if kind == 'group_std(eps=1e-4)':
      centred = centred / (np.sqrt((centred**2).sum() / (len(rewards) - 1)) + 1e-4)
    if kind == 'leave_one_out':
      centred = np.array([r - (rewards.sum() - r) / (len(rewards) - 1) for r in rewards])
    if kind == 'group_center_batch_std':
      centred = centred / (spread + 1e-6)
    if kind == 'batch_whiten':
      centred = (rewards - REWARDS.sum() / 4) / (spread + 1e-6)
    out[member] = centred
  return out


STD, CENTRE = advantages('group_std')[:, None], advantages('group_center')[:, None]


def aggregate(loss: np.ndarray, kind: str) -> float:
  """Mean of a [4, 4] table over its valid cells."""
  sums = np.where(MASK, loss, 0.0).sum(1)
  return {
    'token_mean': sums.sum() / MASK.sum(),
    'sequence_mean': (sums / N).mean(),
    'sequence_sum': sums.mean(),
    'constant_norm': sums.sum() / (4 * 4),
    'prompt_mean': np.mean([sums[GROUPS == g].sum() / N[GROUPS == g].sum() for g in (0, 1)]),
  }[kind]


def log_of(current, base):
  """Log-ratios, 0 where masked."""
  return np.where(MASK, current - base, 0.0)


def mean_of(table):
  """Mean over each sequence, at each of its cells."""
  return np.broadcast_to((table.sum(1) / N)[:, None], table.shape)


def clipped(ratio, adv, low, high):
  """Table of the clipped surrogate loss."""
  return np.maximum(-adv * ratio, -adv * np.clip(ratio, 1 - low, 1 + high))


def clip(aggregation, *, low=0.2, high=0.28, adv=STD, base=PROXIMAL, weight=1.0, cap=None):
  """Clipped surrogate of token ratios."""

  def loss(current, held):
    del held
    ratio = np.exp(log_of(current, base))
    table = clipped(ratio, adv, low, high)
    if cap is not None:
      table = np.where(adv < 0, np.minimum(table, -adv * cap), table)
    return aggregate(table * weight, aggregation)

  return loss


def gspo(low, high):
  """Sequence ratios of the form GSPO-token."""

  def loss(current, held):
    pooled = np.exp(mean_of(log_of(held, PROXIMAL)))
    ratio = pooled * np.exp(np.where(MASK, current - held, 0.0))
    return aggregate(clipped(ratio, STD, low, high), 'sequence_mean')

  return loss


def gmpo(low, high):
  """Geometric mean of clipped log-ratios."""

  def loss(current, held):
    del held
    d, sign = log_of(current, PROXIMAL), np.where(STD > 0, 1.0, -1.0)
    d = np.where(MASK, sign * np.minimum(sign * d, sign * np.clip(d, -low, high)), 0.0)
    return aggregate(-STD * np.exp(mean_of(d)), 'sequence_mean')

  return loss


def cispo(low, high):
  """Clipped weights, held."""

  def loss(current, held):
    weight = np.clip(np.exp(log_of(held, PROXIMAL)), low, high)
    return aggregate(-weight * STD * np.where(MASK, current, 0.0), 'token_mean')

  return loss


def kl(kind):
  """KL to the anchor."""

  def loss(current, held):
    d, s = log_of(current, ANCHOR), log_of(held, ANCHOR)
    table = {
      'k1': d,
      'k2': d**2 / 2,
      'k3': np.exp(-d) - 1 + d,
      'k3_plus': d**2 / 2 - s**2 / 2 + np.exp(-s) - 1 + s,
    }[kind]
    return aggregate(table, 'token_mean')

  return loss


W = np.exp(log_of(PROXIMAL, BEHAVIOUR))
PRODUCT = np.broadcast_to(np.prod(W, 1, where=MASK)[:, None], W.shape)

LOSSES = {
  'grpo': clip('sequence_mean', high=0.2),
  'dapo': clip('token_mean'),
  'prompt_mean': clip('prompt_mean'),
  'dr_grpo': clip('constant_norm', high=0.2, adv=CENTRE),
  'sequence_sum': clip('sequence_sum', high=0.2),
  'dual_clip': clip('token_mean', cap=1.5),
  'gspo': gspo(0.1, 0.1),
  'gspo_narrow': gspo(3e-4, 4e-4),
  'cispo': cispo(0.0, 1.28),
  'cispo_two_sided': cispo(0.8, 1.28),
  'gmpo': gmpo(0.35, 0.35),
  'gmpo_narrow': gmpo(0.15, 0.15),
  'bypass': clip('token_mean', base=BEHAVIOUR),
  'decoupled': clip('token_mean', weight=W),
  'decoupled_ppo': clip('token_mean', weight=np.minimum(W, 1.2)),
  'icepop': clip('token_mean', weight=np.where((W >= 0.8) & (W <= 1.3), W, 0.0)),
  'sequence_tis': clip('token_mean', weight=np.minimum(PRODUCT, 1.2)),
  'rloo': lambda c, held: aggregate(
    -advantages('leave_one_out')[:, None] * np.where(MASK, c, 0.0), 'sequence_sum'
  ),
  'unbounded': clip('token_mean', low=1.0, high=1e9),
} | {kind: kl(kind) for kind in ('k1', 'k2', 'k3', 'k3_plus')}

ADVANTAGES = (
  'group_center',
  'group_std',
  'group_std(ddof=0)',
  'group_std(eps=1e-4)',
  'leave_one_out',
  'group_center_batch_std',
  'batch_whiten',
)


def value_and_gradient(loss) -> tuple[float, np.ndarray]:
  """Value, and gradient over the 12 valid tokens in row order, by central differences."""
  step, gradient = 1e-6, []
  for row, column in zip(*np.nonzero(MASK), strict=True):
    high, low = CURRENT.copy(), CURRENT.copy()
    high[row, column] += step
    low[row, column] -= step
    gradient.append((loss(high, CURRENT) - loss(low, CURRENT)) / (2 * step))
  return float(loss(CURRENT, CURRENT)), np.array(gradient)


def main():
  """Prints every value."""
  lines = [f'{kind}: {advantages(kind).round(8).tolist()}' for kind in ADVANTAGES]
  for name, loss in LOSSES.items():
    value, gradient = value_and_gradient(loss)
    lines.append(f'{name}: {value:+.8f} ' + ' '.join(f'{g:+.5f}' for g in gradient))
  print('\n'.join(lines))


if __name__ == '__main__':
  main()
