"""Prints the golden values of the objectives: numpy float64, gradients by central differences.

Written from the formulas, without the code under test; `python
tests/unit/objectives/golden_losses.py` prints what `test_golden_losses.py` holds as constants, and
a test compares the two.
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


def advantages(kind: str) -> np.ndarray:
  """Advantages of the four sequences, float64 [4]."""
  out = np.zeros(4)
  for group in (0, 1):
    member = GROUPS == group
    rewards = REWARDS[member]
    centred = rewards - rewards.mean()
    if kind == 'std':
      centred = centred / (np.sqrt((centred**2).sum() / (len(rewards) - 1)) + 1e-6)
    if kind == 'leave_one_out':
      centred = np.array([r - (rewards.sum() - r) / (len(rewards) - 1) for r in rewards])
    out[member] = centred
  return out


def aggregate(loss: np.ndarray, kind: str) -> float:
  """Mean of a [4, 4] table over its valid cells, by token or by sequence."""
  loss = np.where(MASK, loss, 0.0)
  if kind == 'token_mean':
    return loss.sum() / MASK.sum()
  return (loss.sum(1) / MASK.sum(1)).mean()


def clipped(current, adv, low, high, base, weight=None):
  """Table of the clipped surrogate loss."""
  ratio = np.exp(np.where(MASK, current - base, 0.0))
  adv = adv[:, None]
  loss = np.maximum(-adv * ratio, -adv * np.clip(ratio, 1 - low, 1 + high))
  return loss if weight is None else loss * weight


def kl(current, held, kind):
  """Table of a KL estimate.

  `held` is the constant copy of `current` of the straight-through form.
  """
  d, s = np.where(MASK, current - ANCHOR, 0.0), np.where(MASK, held - ANCHOR, 0.0)
  return {
    'k1': d,
    'k2': d**2 / 2,
    'k3': np.exp(-d) - 1 + d,
    'k3_plus': d**2 / 2 - s**2 / 2 + np.exp(-s) - 1 + s,
  }[kind]


def importance(cap=np.inf):
  """Weights proximal / behaviour."""
  return np.minimum(np.exp(np.where(MASK, PROXIMAL - BEHAVIOUR, 0.0)), cap)


LOSSES = {
  'clip_0.2_0.2_sequence_mean': lambda c: aggregate(
    clipped(c, advantages('std'), 0.2, 0.2, PROXIMAL), 'sequence_mean'
  ),
  'clip_0.2_0.28_token_mean': lambda c: aggregate(
    clipped(c, advantages('std'), 0.2, 0.28, PROXIMAL), 'token_mean'
  ),
  'bypass': lambda c: aggregate(clipped(c, advantages('std'), 0.2, 0.28, BEHAVIOUR), 'token_mean'),
  'decoupled': lambda c: aggregate(
    clipped(c, advantages('std'), 0.2, 0.28, PROXIMAL, importance()), 'token_mean'
  ),
  'decoupled_cap_1.2': lambda c: aggregate(
    clipped(c, advantages('std'), 0.2, 0.28, PROXIMAL, importance(1.2)), 'token_mean'
  ),
  'k1': lambda c: aggregate(kl(c, CURRENT, 'k1'), 'token_mean'),
  'k2': lambda c: aggregate(kl(c, CURRENT, 'k2'), 'token_mean'),
  'k3': lambda c: aggregate(kl(c, CURRENT, 'k3'), 'token_mean'),
  'k3_plus': lambda c: aggregate(kl(c, CURRENT, 'k3_plus'), 'token_mean'),
}


def value_and_gradient(loss) -> tuple[float, np.ndarray]:
  """Value, and gradient over the 12 valid tokens in row order, by central differences."""
  step, gradient = 1e-6, []
  for row, column in zip(*np.nonzero(MASK), strict=True):
    high, low = CURRENT.copy(), CURRENT.copy()
    high[row, column] += step
    low[row, column] -= step
    gradient.append((loss(high) - loss(low)) / (2 * step))
  return float(loss(CURRENT)), np.array(gradient)


def main():
  """Prints every value."""
  lines = [
    f'{kind}: {advantages(kind).round(8).tolist()}' for kind in ('std', 'center', 'leave_one_out')
  ]
  for name, loss in LOSSES.items():
    value, gradient = value_and_gradient(loss)
    lines.append(f'{name}: {value:+.8f} ' + ' '.join(f'{g:+.5f}' for g in gradient))
  print('\n'.join(lines))


if __name__ == '__main__':
  main()
