"""What each feature of the learner costs: a step with it over a step without, taken in turn in the same run.

  python -m benchmarks.learner_features

A feature is what a user would put on the command line, on top of a plain config (GRPO, AdamW in float32, no remat); a
step is `Learner.train` until its metrics are there, packing included. The two learners take turns, so that a change of
the machine's pace meets both. Random weights of SmolLM2-135M's shape, 8 groups of 8 samples, 64 prompt and 64 sampled
tokens. The last line is JSON: mean seconds of a step with each feature and of plain ones, their ratio, and the first
step, which compiles.
"""

from rlax_stack import huge_pages

if __name__ == '__main__':  # before anything large is imported
  huge_pages.restart_with_huge_pages()

import dataclasses
import json

import jax
import numpy as np
from absl import app, flags, logging

from benchmarks.features import FEATURES, WORK, ratio_to_plain
from rlax_stack.learner.precision import COMPUTE_DTYPES, resolve_compute_dtype
from rlax_stack.models import decoder
from rlax_stack.models.shapes import SHAPES

_FEATURES = flags.DEFINE_list('features', list(FEATURES), 'which of them')
_LAYERS = flags.DEFINE_integer(
  'layers', 30, 'layers of the model; fewer are quicker', lower_bound=1
)
_REPEATS = flags.DEFINE_integer('repeats', 3, 'measured steps of each; their mean counts')
_DTYPE = flags.DEFINE_enum('compute_dtype', 'auto', COMPUTE_DTYPES, 'of activations')


def main(argv):
  """Prints a table and one line of JSON."""
  del argv
  unknown = [name for name in _FEATURES.value if name not in FEATURES]
  if unknown:
    raise app.UsageError(f'unknown features {unknown}. Choose from: {", ".join(FEATURES)}.')
  dtype = resolve_compute_dtype(_DTYPE.value)
  config = dataclasses.replace(SHAPES['smollm2_135m'], num_layers=_LAYERS.value)
  params = jax.tree.map(np.asarray, decoder.init_params(config, jax.random.key(0)))
  results = {}
  print(f'{"feature":24s}{"ratio":>8s}{"step s":>9s}{"plain s":>9s}{"first s":>9s}')
  for name in _FEATURES.value:
    found = ratio_to_plain(config, params, FEATURES[name], WORK, dtype, _REPEATS.value)
    results[name] = {key: round(value, 3) for key, value in found.items()}
    row = ''.join(f'{found[key]:9.2f}' for key in ('step_s', 'plain_s', 'first_s'))
    print(f'{name:24s}{found["ratio"]:8.2f}{row}', flush=True)
    logging.info('%s: %s', name, results[name])
    jax.clear_caches()
  print(
    json.dumps(
      {
        'benchmark': 'learner_features',
        'dtype': np.dtype(dtype).name,
        'layers': config.num_layers,
        **results,
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
