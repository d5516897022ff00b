"""Plans of reference configs for described TPU slices: the learner's own step compiled, and what it says of memory."""

import importlib
import pathlib

import pytest

from rlax_stack import plan
from rlax_stack.config import from_config_dict
from rlax_stack.plan_of_config import make_plan
from rlax_stack.planning.topologies import describe

pytest.importorskip('libtpu')

_ROOT = pathlib.Path(__file__).parents[2]
_PLANNED = sorted(path.stem for path in (_ROOT / 'configs' / 'clusters').glob('[a-z]*.py'))
_NO_ENGINE = {
  'llama3_70b_v6e_256'
}  # a rollout worker is one device, and none of these holds the weights


@pytest.mark.aot_all
@pytest.mark.parametrize('name', _PLANNED)
def test_reference_configs_fit(name):
  module = importlib.import_module(f'configs.clusters.{name}')
  config = from_config_dict(module.get_config())
  report = make_plan(config, plan.shape_of(config.model.path), describe(config.plan.topology))
  print(report.text())
  assert report.summary['engine_fits'] == (name not in _NO_ENGINE)
  assert report.summary['fits'] and 0.02 < report.summary['hbm_free_fraction'] < 1
  assert 0.05 < report.summary['modelled_mfu'] < 1
