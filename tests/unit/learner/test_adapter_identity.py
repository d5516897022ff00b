"""Whom an adapter belongs to."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from rlax_stack.errors import CheckpointError
from rlax_stack.learner.adapter_identity import check_identity, identity_of, saved_settings
from rlax_stack.models.adapter import AdapterSettings
from rlax_stack.models.frozen import freeze
from rlax_stack.sharding import make_mesh, param_shardings

SETTINGS = AdapterSettings(kind='lora', rank=2, alpha=4.0, targets=('*q_proj*',), base='int4')


def test_it_knows_weights_and_settings_but_not_shardings(tiny_params):
  base = freeze(tiny_params, 'int4')
  here = identity_of(SETTINGS, base)
  mesh = make_mesh({'fsdp': 2, 'tensor': 2}, jax.devices()[:4])
  spread = jax.device_put(base, param_shardings(base, mesh))
  saved = json.loads(json.dumps(identity_of(SETTINGS, spread)))
  check_identity(saved, here, 'step 3')
  assert saved_settings(saved, 'step 3') == SETTINGS
  with pytest.raises(CheckpointError, match='step 3 holds .* rank is 2 there and 4 here'):
    check_identity(saved, identity_of(dataclasses.replace(SETTINGS, rank=4), base), 'step 3')
  other = jax.tree.map(np.copy, tiny_params)
  other['final_norm']['scale'][0] += 1
  with pytest.raises(CheckpointError, match='base_sum is'):
    check_identity(saved, identity_of(SETTINGS, freeze(other, 'int4')), 'step 3')
  with pytest.raises(CheckpointError, match='kind is None there'):
    check_identity(None, here, 'step 3')
  with pytest.raises(CheckpointError, match='no readable description'):
    saved_settings({'kind': 'lora'}, 'step 3')
