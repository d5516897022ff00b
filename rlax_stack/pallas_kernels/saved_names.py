"""Names that kernels give to what their backward pass reads, for remat policies to keep.

A name changes nothing by itself. Invariant: whoever differentiates a kernel under a policy that keeps
these names does not run its forward pass again.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENTION = 'attention'  # outputs of attention and the log-sum-exp of its scores


def named_attention(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The output of an attention and its log-sum-exp, by the name ATTENTION."""
  return checkpoint_name(out, ATTENTION), checkpoint_name(lse, ATTENTION)
