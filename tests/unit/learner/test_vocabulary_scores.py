"""Terms of whole distributions on their way through the learner: meshes, held scores, memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.learner.packing import RowShape
from rlax_stack.learner.row_plan import RowPlan
from rlax_stack.learner.scoring import ForwardSettings, target_log_probs
from rlax_stack.models import decoder
from rlax_stack.objectives.boxes import BoundBox, Box
from rlax_stack.objectives.inputs import Penalty, Statistics
from rlax_stack.objectives.objective import resolve
from rlax_stack.objectives.vocabulary import current_terms

_ONE_ROW = RowPlan(shape=RowShape(48, 48), micro_batch_rows=1, max_micro_batches=9)


def _moments(log_policy, target, *, proximal):
  power = jnp.sum(jnp.exp(2.0 * log_policy), axis=-1)
  chosen = jnp.take_along_axis(log_policy, target[:, None], axis=-1)[:, 0]
  return {'power': power, 'chosen': chosen, 'seen_top': proximal['top']}


def _top(log_policy, target):
  del target
  top, ids = jax.lax.top_k(log_policy, 2)
  return {'top': top, 'ids': ids}


def _penalty(inputs, *, vocabulary, statistics):
  gap = jnp.abs(vocabulary['chosen'] - inputs.log_probs_t)
  same = jnp.abs(vocabulary['seen_top'] - vocabulary['top'])[..., 0]
  whole = jnp.abs(statistics.tokens['power'] - vocabulary['power'])
  drift = vocabulary['top'][..., 0] - inputs.proximal_log_probs_t
  values = {'gap': gap, 'same': same, 'whole': whole, 'drift': drift, 'power': vocabulary['power']}
  return Penalty(vocabulary['power'], metrics=values)


def _statistics(inputs, *, vocabulary):
  del inputs
  return Statistics(tokens={'power': vocabulary['power']})


@pytest.fixture(scope='module')
def probing():
  box = Box(
    _penalty,
    formula='+ probe',
    vocabulary=_moments,
    proximal_vocabulary=_top,
    batch_statistics=_statistics,
  )
  return dataclasses.replace(resolve(corrections=()), regularisers=(BoundBox('probe', box),))


@pytest.mark.parametrize('updates', [1, 2])
@pytest.mark.parametrize('mesh', [{}, {'data': 2, 'fsdp': 2, 'tensor': 2}], ids=str)
def test_boxes_get_what_their_hooks_gave(mesh, updates, probing, make_learner, make_groups):
  plan = (
    dataclasses.replace(_ONE_ROW, micro_batch_rows=4, max_micro_batches=3) if mesh else _ONE_ROW
  )
  learner = make_learner(mesh=mesh, objective=probing, rows=plan, updates_per_batch=updates)
  first = learner.train(make_groups()).result()
  assert first['gap'] < 1e-5 and first['same'] < 1e-6 and first['whole'] < 1e-6
  assert first['drift'] > 0  # the most likely word is more likely than the sampled ones
  one = make_learner(objective=probing, rows=_ONE_ROW, updates_per_batch=updates)
  want = one.train(make_groups()).result()
  for name in ('loss', 'grad_norm', 'power', 'drift'):
    assert first[name] == pytest.approx(want[name], rel=2e-4), name


def test_terms_follow_the_weights_and_the_proximal_ones_stay(probing, make_learner, make_groups):
  """After one update of the batch the current terms have moved, the held ones are of the start."""
  learner = make_learner(objective=probing, updates_per_batch=3)
  packed = learner._pack_to_train(make_groups())[0]
  batch, num_micro = learner._place(packed)
  scored = learner._proximal(learner.state.params, batch, num_micro)
  held = scored.proximal_vocabulary['regularisers/0']
  assert held['ids'].dtype == jnp.int32 and held['top'].shape == (*batch.mask_t.shape, 2)
  found = learner.train(make_groups()).result()
  again = learner._proximal(learner.state.params, batch, num_micro)
  moved = jnp.abs(again.proximal_vocabulary['regularisers/0']['top'] - held['top'])
  assert float(moved.max()) > 1e-3
  assert found['same'] < 1e-6


def test_no_logits_of_all_tokens_in_the_compiled_step(tiny, make_learner, make_groups):
  """What the terms add to the step's temporaries, forward and backward, hardly grows with the tokens."""
  config = dataclasses.replace(tiny, num_layers=1, vocab_size=8192)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: (0.1 * rng.standard_normal(leaf.shape)).astype(np.float32),
    decoder.abstract_params(config),
  )
  boxes = ('peak_entropy(top_p=0.8)', 'lp_reg')

  def temporary(tokens, regularisers):
    plan = RowPlan(shape=RowShape(tokens, tokens), micro_batch_rows=1, max_micro_batches=1)
    objective = resolve(corrections=(), regularisers=regularisers)
    learner = make_learner(config=config, params=params, objective=objective, rows=plan)
    batch, num_micro = learner._place(learner._pack_to_train(make_groups())[0])
    compiled = learner._step.lower(learner.state, batch, num_micro).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  added = [temporary(tokens, boxes) - temporary(tokens, ()) for tokens in (256, 1024)]
  logits = 4 * 1024 * config.vocab_size
  assert added[1] < 0.5 * logits
  assert added[1] - added[0] < 0.02 * logits


def test_scores_hold_the_terms_that_are_asked_for(tiny, probing, make_groups, make_learner):
  learner = make_learner(objective=probing)
  rows = jax.tree.map(lambda x: x[0], learner._place(learner._pack_to_train(make_groups())[0])[0])
  terms = current_terms(probing, score_proximal=False)
  scored = target_log_probs(learner.params, tiny, rows, ForwardSettings(), terms=terms)
  assert set(scored.vocabulary['regularisers/0']) == {'power', 'chosen', 'seen_top', 'top', 'ids'}
  np.testing.assert_allclose(
    scored.vocabulary['regularisers/0']['chosen'], scored.log_prob, atol=1e-5
  )
  bare = target_log_probs(learner.params, tiny, rows, ForwardSettings())
  assert bare.vocabulary == {}
  np.testing.assert_array_equal(bare.log_prob, scored.log_prob)
