"""Plans of a tiny model on virtual devices: bytes by hand, the summary, what does not fit, what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from configs.clusters import qwen3_0p6b_v5e_8
from rlax_stack import assembly, config_rules, plan, plan_of_config
from rlax_stack.config import from_config_dict
from rlax_stack.errors import ConfigError
from rlax_stack.learner.packing import RowShape, empty_batch
from rlax_stack.models.shapes import SHAPES
from rlax_stack.plan_of_config import make_plan
from rlax_stack.planning import learner_programs
from rlax_stack.planning.cost_model import model_flops, num_parameters
from rlax_stack.planning.learner_programs import OutOfMemory, Recorded, StateBytes
from rlax_stack.planning.report import Line, Report, gib, seconds
from rlax_stack.planning.topologies import KINDS, Topology, describe, virtual_devices
from rlax_stack.sharding import make_mesh

_TINY = dataclasses.replace(
  SHAPES['smollm2_135m'], num_layers=2, vocab_size=512, hidden_size=64, intermediate_size=128
)


def _config(**changes):
  config = base.get_config()
  config.learner.mesh.fsdp, config.learner.mesh.tensor = 2, 1
  config.model.compute_dtype = 'float32'
  config.rollout.max_prompt_tokens, config.rollout.max_tokens = 32, 32
  config.rollout.groups_per_step, config.rollout.group_size = 4, 4
  for name, value in changes.items():
    section, _, field = name.partition('__')
    config[section][field] = value
  made = from_config_dict(config)
  config_rules.check(made)
  return made


def _topology(**kind):
  return Topology(
    name='two',
    kind=dataclasses.replace(KINDS['h100'], **kind),
    devices=tuple(jax.devices()[:2]),
    compiled_for='virtual CPU',
  )


@pytest.fixture(scope='module')
def report():
  return make_plan(_config(), _TINY, _topology())


def test_the_state_is_counted_by_kind():
  config = _config()
  settings = assembly.learner_settings(config, jnp.float32)
  mesh = make_mesh({'fsdp': 2}, jax.devices()[:2])
  batch = learner_programs.abstract_batch(_TINY, settings, mesh)
  held = learner_programs.state_bytes(learner_programs.learner_state(_TINY, settings, mesh), batch)
  assert isinstance(held, StateBytes) and held.others == 0
  norms = (2 * _TINY.num_layers + 1) * _TINY.hidden_size  # not split
  split = (num_parameters(_TINY) - norms) / 2 + norms
  assert held.parameters == 4 * split
  assert held.optimizer == pytest.approx(2 * 4 * split, abs=16)  # two moments and counters
  rows, length = (
    settings.rows.max_micro_batches * settings.rows.micro_batch_rows,
    batch.tokens.shape[2],
  )
  assert batch.tokens.shape == (
    settings.rows.max_micro_batches,
    settings.rows.micro_batch_rows,
    length,
  )
  assert held.batch > rows / 2 * length * 3 * 4


def test_an_adapter_is_counted_beside_its_frozen_weights():
  config = _config()
  adapter = dataclasses.replace(config.learner.adapter, kind='lora', rank=4, base='int4')
  config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, adapter=adapter))
  settings = assembly.learner_settings(config, jnp.float32)
  mesh = make_mesh({'fsdp': 2}, jax.devices()[:2])
  frozen = learner_programs.frozen_weights(_TINY, settings, mesh)
  state = learner_programs.learner_state(_TINY, settings, mesh)
  held = learner_programs.state_bytes(
    state, learner_programs.abstract_batch(_TINY, settings, mesh), *frozen
  )
  wide, narrow, layers = _TINY.num_heads * _TINY.head_dim, _TINY.num_kv_heads * _TINY.head_dim, 2
  mlp, hidden = _TINY.intermediate_size, _TINY.hidden_size
  shapes = [(wide, hidden), (narrow, hidden), (narrow, hidden), (hidden, wide)]
  shapes += [(mlp, hidden), (mlp, hidden), (hidden, mlp)]
  whole = 4 * layers * 4 * sum(rows + columns for rows, columns in shapes)
  assert learner_programs.whole_bytes(state.params) == whole
  assert held.optimizer == pytest.approx(2 * held.parameters, abs=16)
  kernels = layers * sum(rows * columns for rows, columns in shapes)
  scales = layers * sum(rows * columns // 64 for rows, columns in shapes)
  rest = num_parameters(_TINY) - kernels
  assert learner_programs.whole_bytes(frozen) == 0.5 * kernels + 4 * scales + 2 * rest
  assert held.state == held.parameters + held.frozen + held.optimizer
  topology = _topology()
  lines = plan_of_config._state_lines(held, 1e9)
  lines += plan_of_config._fleet_lines(config, _TINY, settings, topology, 1.0)
  told = {line.name: line.value for line in lines}
  assert told['frozen weights'] == gib(held.frozen) and told['adapter on the wire'] == gib(whole)
  counts = {'tokens': 100, 'targets': 50, 'pairs': 0.0}
  full = model_flops(_TINY, **counts)
  assert model_flops(_TINY, **counts, weight_gradients=False) == pytest.approx(full * 2 / 3)
  forward = model_flops(_TINY, **counts, backward=False)
  assert forward == pytest.approx(full / 3)


def test_the_summary_is_one_line_of_json(report):
  last = json.loads(report.text().splitlines()[-1])
  assert last == report.summary and last['fits'] is True and last['engine_fits'] is True
  assert 0.9 < last['hbm_free_fraction'] < 1 and 0 < last['modelled_mfu'] < 1
  assert last['modelled_step_s'] > 0 and last['devices'] == 2 and last['compile_s'] > 0
  assert 'modelled, not measured' in report.text() and 'virtual CPU' in report.text()


def test_work_is_that_of_the_real_step(report):
  """Needed FLOPs are less than those that the step counts, which pads rows; not by much."""
  lines = {line.name: line.value for _, section in report.sections for line in section}
  needed, counted = float(lines['FLOPs that are needed']), float(lines['FLOPs of a step'])
  assert needed < counted < 4 * needed
  assert 'all-gather sent by a device' in lines


def test_a_mixture_is_planned_with_its_routing_recorded():
  mixture = dataclasses.replace(_TINY, num_experts=8, experts_per_token=2, moe_intermediate_size=64)
  config = _config(rollout__router_replay=True, learner__router_z_coef=0.1)
  config = dataclasses.replace(
    config,
    learner=dataclasses.replace(
      config.learner, mesh=dataclasses.replace(config.learner.mesh, fsdp=1, expert=2)
    ),
  )
  made = make_plan(config, mixture, _topology())
  lines = {line.name: line.value for _, section in made.sections for line in section}
  assert float(lines['parameters']) == pytest.approx(num_parameters(mixture), rel=1e-3)
  idle = 2 * 6 * 3 * 64 * 64  # two layers, six experts, three kernels
  used = num_parameters(mixture) - idle
  assert float(lines['of them in use for a token']) == pytest.approx(used, rel=1e-3)
  needed, counted = float(lines['FLOPs that are needed']), float(lines['FLOPs of a step'])
  # Both devices do all but the experts.
  assert needed < counted < 6 * needed
  settings = assembly.learner_settings(config, jnp.float32)
  mesh = make_mesh({'expert': 2}, jax.devices()[:2])
  recorded = Recorded(experts=True)
  batch = learner_programs.abstract_batch(mixture, settings, mesh, recorded)
  assert batch.experts.shape == (*batch.tokens.shape, 2, 2) and batch.experts.dtype == jnp.int16
  assert batch.place_weight.shape == batch.tokens.shape
  bare = learner_programs.abstract_batch(_TINY, settings, mesh)
  assert bare.experts is None and bare.place_weight is None
  with pytest.raises(ConfigError, match='router_replay=True .*this model is dense'):
    make_plan(_config(rollout__router_replay=True), _TINY, _topology())


def test_a_device_that_is_too_small_is_named_with_the_knob():
  settings = assembly.learner_settings(_config(), jnp.float32)
  mesh = make_mesh({'fsdp': 2}, jax.devices()[:2])
  train = learner_programs.train_figures(_TINY, settings, mesh)
  score = learner_programs.score_figures(_TINY, settings, mesh)
  assert score.temporary_bytes < train.temporary_bytes and 2.5 * score.flops < train.flops
  empty = empty_batch(2, RowShape(8, 4), 3)
  assert empty.kept_ids_t.shape == (2, 4, 3) and not empty.mask_t.any()
  assert issubclass(OutOfMemory, ConfigError) and not settings.scores_proximal
  small = make_plan(_config(), _TINY, _topology(hbm_bytes=1e6))
  assert small.summary['fits'] is False and small.summary['hbm_free_fraction'] < 0
  assert 'micro_batch_tokens' in small.summary['cure'] or 'fsdp' in small.summary['cure']


def test_what_is_only_scored_is_counted():
  """An anchor in float32, and a teacher of twice the layers in the compute dtype."""
  config = _config(
    objective__regularisers=('kl_anchor(coef=0.1)', 'kl_teacher(coef=1.0)'),
    learner__teacher='shape:smollm2_135m',
    model__compute_dtype='bfloat16',
  )
  settings = assembly.learner_settings(config, jnp.bfloat16)
  mesh = make_mesh({'fsdp': 2}, jax.devices()[:2])
  teacher = dataclasses.replace(_TINY, num_layers=2 * _TINY.num_layers)
  anchor, taught = learner_programs.scored_weights(_TINY, settings, mesh, teacher)
  state = learner_programs.learner_state(_TINY, settings, mesh)
  batch = learner_programs.abstract_batch(_TINY, settings, mesh)
  held = learner_programs.state_bytes(state, batch, scored=(anchor, taught))
  norms = [x for x in jax.tree.leaves(state.params) if x.ndim and x.sharding.is_fully_replicated]
  assert held.parameters == 4 * (num_parameters(_TINY) + sum(x.size for x in norms)) / 2
  apart = learner_programs.state_bytes(state, batch, scored=(taught,)).scored
  assert held.scored - apart == held.parameters
  more = learner_programs.teacher_weights(teacher, settings, mesh)
  assert apart == sum(2 * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(more))
  figures = learner_programs.teacher_figures(teacher, _TINY, settings, mesh)
  own = learner_programs.score_figures(_TINY, settings, mesh)
  assert own.flops < figures.flops < 2 * own.flops
  made = make_plan(config, _TINY, _topology(), teacher=teacher)
  names = {line.name for _, section in made.sections for line in section}
  assert {'anchor and teacher', 'scoring by the teacher'} <= names


def test_prices_and_several_updates(report):
  config = _config(plan__price=2.0, learner__updates_per_batch=2)
  both = make_plan(config, _TINY, _topology())
  names = [line.name for _, section in both.sections for line in section]
  assert 'price of a step' in names
  assert both.summary['modelled_step_s'] > 2 * report.summary['modelled_step_s']


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('v9:2x2', "topology 'v9:2x2' is none. Write KIND:SIZES"),
    ('v5p', "topology 'v5p' is none"),
    ('h100:999', 'needs 999 virtual CPU devices, but there are 8'),
  ],
)
def test_topologies_that_are_none(name, message):
  with pytest.raises(ConfigError, match=message):
    describe(name)


def test_gpu_nodes_are_virtual():
  assert virtual_devices('h100:8') == 8 and virtual_devices('v5p:8x8x16') == 1
  assert len(describe('h100:8').devices) == 8


def test_the_command_refuses_what_it_cannot_plan():
  with pytest.raises(
    ConfigError, match='no topology was given. Add for example --topology=v5e:8x8'
  ):
    plan.plan(['plan', '--config=configs/quickstart.py'])
  with pytest.raises(ConfigError, match='the mesh needs data 1 x fsdp 1 .* but there are 8'):
    plan.plan(['plan', '--config=configs/quickstart.py', '--topology=h100:8'])


def test_the_command_saves_its_report(tmp_path):
  config = from_config_dict(qwen3_0p6b_v5e_8.get_config())
  assert plan.shape_of(config.model.path) == SHAPES['qwen3_0p6b']
  made = Report(
    title='t', sections=(('s', (Line('a', gib(2**30), 'counted'),)),), summary={'fits': True}
  )
  made.save(str(tmp_path / 'plan.txt'))
  assert (tmp_path / 'plan.txt').read_text().splitlines()[-1] == '{"fits": true}'
  assert '1.00 GiB  counted' in made.text() and seconds(0.05) == '50.00 ms'
  with pytest.raises(ConfigError, match='cannot be written'):
    made.save(str(tmp_path / 'no' / 'plan.txt'))


def test_the_largest_rows_that_fit_are_searched():
  """`searched_lines`, compiled once more for each knob: twice the tokens need more than the little that is free."""
  config = _config(plan__search=True, learner__micro_batch_tokens=128, learner__row_length=128)
  model = dataclasses.replace(_TINY, vocab_size=64)
  settings = assembly.learner_settings(config, jnp.float32)
  mesh = make_mesh({'fsdp': 2}, jax.devices()[:2])
  figures = learner_programs.train_figures(model, settings, mesh)
  small = _topology(hbm_bytes=1.05 * (figures.argument_bytes + figures.temporary_bytes))
  found = make_plan(config, model, small)
  lines = {line.name: line for _, section in found.sections for line in section}
  for name in ('most tokens of a micro-batch on a device', 'most tokens of a row'):
    assert lines[name].value == '128' and lines[name].known.endswith('256 do not fit')


def test_workers_follow_the_lengths_of_samples():
  def workers(**changes):
    report = make_plan(_config(**changes), _TINY, _topology())
    lines = {line.name: line.value for _, section in report.sections for line in section}
    return float(lines['single-device workers'])

  longest = workers()
  assert workers(plan__mean_tokens=16) < 0.6 * longest
  assert workers(plan__mean_tokens=16, plan__spread=8.0) > workers(plan__mean_tokens=16)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'plan__mean_tokens': 33}, 'config.plan.mean_tokens=33 exceeds config.rollout.max_tokens=32'),
    ({'plan__spread': 0.5}, 'config.plan.spread must be 1 .* or more, got 0.5'),
    ({'plan__mean_tokens': -1}, 'config.plan.mean_tokens must be 0 or more'),
  ],
)
def test_lengths_that_cannot_be_are_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    _config(**changes)
