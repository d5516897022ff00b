"""The parts of a run, connected in this process: the numerics contract across engine and learner."""

import dataclasses
import json
import threading

import jax
import numpy as np
import pytest

from rlax_stack import assembly, command_line, sources
from rlax_stack.compile_counter import CompileCounter
from rlax_stack.errors import CheckpointError, ConfigError, PromptTooLongError
from rlax_stack.fleet.local_runtime import LocalRuntime
from rlax_stack.fleet.parameter_server import ParameterServer
from rlax_stack.learner.checkpoint import Checkpointer
from rlax_stack.observe import metric_names
from rlax_stack.observe.metrics import open_metrics
from rlax_stack.observe.progress import Progress
from rlax_stack.observe.rollouts_writer import RolloutsWriter
from rlax_stack.profiling import StepTraces, make_utilisation
from rlax_stack.rollout.requests import GenerationRequest
from rlax_stack.rollout.trajectory import make_trajectory
from rlax_stack.train_loop import Account, LoopParts, TrainLoop, account_from, batch_metrics
from rlax_stack.types import Group

STEPS = 3


@pytest.fixture(scope='module')
def config(toy_arguments):
  flags = toy_arguments('unused')
  changes = (
    f'--config.steps={STEPS}',
    '--config.rollout.group_size=4',
    '--config.eval.every_steps=2',
  )
  return command_line.parse(['launch', *flags, *changes])[0]


@pytest.fixture(scope='module')
def model(config):
  prompts = assembly.make_prompts(config)
  return assembly.load_checked_model(config, {'train': prompts.train})


def run_loop(config, model, folder):
  """A run through coordinator, parameter server and worker thread; the learner and all batches."""
  prompts = assembly.make_prompts(config)
  learner = assembly.make_learner(config, model)
  coordinator = assembly.make_coordinator(config, prompts.iterator)
  server, batches = ParameterServer(), []
  train = learner.train
  learner.train = lambda groups: batches.append(groups) or train(groups)
  with (
    sources.make_chain(config.rewards) as chain,
    open_metrics(jsonl_path=folder / 'metrics.jsonl') as metrics,
    CompileCounter() as counter,
  ):
    worker = assembly.make_worker(config, model, chain)
    (folder / 'samples').mkdir()
    checkpointer = Checkpointer(folder / 'checkpoints', keep=1)
    parts = LoopParts(
      learner=learner,
      coordinator=coordinator,
      parameter_server=server,
      checkpointer=checkpointer,
      metrics=metrics,
      rollouts=RolloutsWriter(folder / 'samples'),
      progress=Progress(mode='off'),
      compile_counter=counter,
      warm_up=lambda: worker.warm_up(server.latest()),
      evaluate=lambda: assembly.held_out_groups(
        config,
        model,
        chain,
        prompts.held_out,
        lambda requests: worker.generate_all(requests, server.latest()),
      ),
      score_seconds=lambda: worker.stats.score_s,
      engine_figures=worker.figures,
      utilisation=make_utilisation(config, model.config, 'cpu'),
      traces=StepTraces(folder / 'profile', config.profile.steps),
      stop_requested=lambda: False,
    )
    loop = TrainLoop(config, parts, Account())
    with LocalRuntime(worker, coordinator=coordinator, parameter_server=server):
      assert loop.run()
    checkpointer.close()
  coordinator.check()
  return loop, learner, batches, coordinator


def run_synchronously(config, model):
  """The same steps with neither threads nor coordinator: draw, score, train, swap."""
  prompts = assembly.make_prompts(config)
  learner = assembly.make_learner(config, model)
  scheduler = assembly.make_scheduler(config, model)
  sampling = sources.train_sampling(config, model.tokenizer.stop_token_ids)
  count, batches = config.rollout.group_size, []
  with sources.make_chain(config.rewards) as chain:
    for step in range(config.steps):
      scheduler.swap_params(learner.snapshot(), step)
      groups = []
      for index in range(config.rollout.groups_per_step):
        group_id = step * config.rollout.groups_per_step + index
        prompt = prompts.iterator.next()
        groups.append(draw(scheduler, chain, model, prompt, group_id, count, sampling))
      batches.append(groups)
      learner.train(groups).result()
  return learner, batches


def draw(scheduler, chain, model, prompt, group_id, count, sampling):
  requests = [
    GenerationRequest(
      group_id=group_id,
      sample_index=i,
      prompt_tokens=model.tokenizer.encode_chat(prompt.messages),
      sampling=sampling,
    )
    for i in range(count)
  ]
  samples = scheduler.generate_all(requests)
  texts = [model.tokenizer.decode(sample.tokens.tolist()) for sample in samples]
  rewards = chain.score(texts, [prompt] * count)
  trajectories = tuple(
    make_trajectory(sample, prompt_id=prompt.prompt_id, text=text, reward=reward)
    for sample, text, reward in zip(samples, texts, rewards, strict=True)
  )
  return Group(
    group_id=group_id,
    prompt=prompt,
    prompt_tokens=requests[0].prompt_tokens,
    trajectories=trajectories,
  )


@pytest.fixture(scope='module')
def loop_folder(tmp_path_factory):
  return tmp_path_factory.mktemp('loop')


@pytest.fixture(scope='module')
def loop_run(config, model, loop_folder):
  profile = dataclasses.replace(config.profile, steps=(2,), peak_tflops=0.5)
  return run_loop(dataclasses.replace(config, profile=profile), model, loop_folder)


@pytest.mark.slow
def test_on_policy_through_the_fleet_equals_the_synchronous_loop(config, model, loop_run):
  _, learner, batches, _ = loop_run
  want, want_batches = run_synchronously(config, model)
  for groups, want_groups in zip(batches, want_batches, strict=True):
    for group, want_group in zip(groups, want_groups, strict=True):
      for one, other in zip(group.trajectories, want_group.trajectories, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.behaviour_log_probs_t, other.behaviour_log_probs_t)
        np.testing.assert_array_equal(one.version_t, other.version_t)
  jax.tree.map(np.testing.assert_array_equal, learner.params, want.params)


@pytest.mark.slow
def test_every_evaluation_writes_accuracy_and_pass_at_k(loop_run, loop_folder):
  lines = map(json.loads, (loop_folder / 'metrics.jsonl').read_text().splitlines())
  evaluations = [line for line in lines if 'held_out/accuracy' in line]
  assert [line['step'] for line in evaluations] == [0, 2, STEPS]
  for line in evaluations:
    assert line['held_out/pass@1'] == pytest.approx(line['held_out/accuracy'])
    assert line['held_out/response_length'] > 0


@pytest.mark.slow
def test_every_step_says_where_its_time_went(loop_run, loop_folder):
  lines = map(json.loads, (loop_folder / 'metrics.jsonl').read_text().splitlines())
  steps = [line for line in lines if 'time/train' in line]
  assert [line['step'] for line in steps] == [1, 2, STEPS]
  for line in steps:
    parts = {name: line[f'time/{name}'] for name in metric_names.MEASURED}
    assert sum(parts.values()) == pytest.approx(1.0)
    assert min(parts.values()) >= 0 and parts['train'] > 0 and parts['data'] > 0
    assert parts['log_probs'] == 0.0  # nothing is scored beside the update of this objective
    assert line[metric_names.IDLE] == pytest.approx(parts['generate'] + parts['score'])
    assert line['perf/mfu'] == pytest.approx(line['perf/model_flops_per_s'] / 0.5e12)
    worked_s = parts['train'] * line['perf/step_time_s']
    tokens = line['train/row_tokens']
    # The matrices of the toy model: attention 2 x 32 x 16 x (2 + 1), MLP 3 x 32 x 64, head 16 x 32.
    products = 2 * (3072 + 6144) * tokens + 16 * 32 * line['train/targets']
    flops = 6 * products + 12 * 2 * 2 * 16 * line['train/pairs_per_layer']
    # The device worked within the time that the loop took for it, fetching of metrics included.
    assert flops / worked_s <= line['perf/model_flops_per_s'] < 20 * flops / worked_s
  assert [path.name for path in (loop_folder / 'profile').iterdir()] == ['step_2']


@pytest.mark.slow
def test_ledger_and_account_close(config, loop_run):
  loop, _, _, coordinator = loop_run
  counts = coordinator.counts()
  assert counts['trained'] == STEPS * config.rollout.groups_per_step * config.rollout.group_size
  assert loop.account.held_out_before is not None and loop.account.held_out_after is not None
  assert loop.account.train_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize(
  ('dtype', 'most', 'mean'), [('float32', 1e-4, 1e-5), ('bfloat16', 0.1, 2e-3)]
)
def test_engine_log_probs_equal_the_learners(dtype, most, mean, config, model):
  section = dataclasses.replace(config.model, compute_dtype=dtype)
  config = dataclasses.replace(config, model=section)
  learner = assembly.make_learner(config, model)
  scheduler = assembly.make_scheduler(config, model)
  scheduler.swap_params(learner.snapshot(), 0)
  prompts = assembly.make_prompts(config)
  sampling = sources.train_sampling(config, model.tokenizer.stop_token_ids)
  with sources.make_chain(config.rewards) as chain:
    groups = [
      draw(scheduler, chain, model, prompts.iterator.next(), i, 4, sampling) for i in range(3)
    ]
  gaps = [
    np.abs(trajectory.behaviour_log_probs_t - score)[trajectory.mask_t]
    for group, scores in zip(groups, learner.score(groups), strict=True)
    for trajectory, score in zip(group.trajectories, scores, strict=True)
  ]
  gaps = np.concatenate(gaps)
  assert gaps.max() <= most
  assert gaps.mean() <= mean


@pytest.mark.slow
def test_stale_samples_are_corrected_and_bounded(config, model, tmp_path):
  stale = dataclasses.replace(
    config,
    fleet=dataclasses.replace(config.fleet, max_staleness=2),
    rollout=dataclasses.replace(config.rollout, groups_in_flight=6),
  )
  _, learner, batches, coordinator = run_loop(stale, model, tmp_path)
  assert learner.version == STEPS
  for version, groups in enumerate(batches):
    for trajectory in (t for group in groups for t in group.trajectories):
      assert 0 <= version - trajectory.oldest_version <= 2
  counts = coordinator.counts()
  assert counts['dropped_stale'] == 0
  assert counts['in_flight'] <= 6 * config.rollout.group_size
  lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  steps = [line for line in lines if 'rollout/several_versions' in line]
  assert len(steps) == STEPS
  # A step whose batch was there already decodes nothing.
  occupancy = [step['rollout/slot_occupancy'] for step in steps if 'rollout/slot_occupancy' in step]
  assert occupancy and all(0 < value <= 1 for value in occupancy)
  for step in steps:
    assert 0 <= step['rollout/several_versions'] <= 1
    assert step['rollout/samples_carried'] >= 0
    assert step['train/prepared_ahead'] in (0.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize('weights, kv', [('int8', 'int8'), ('fp8', 'same')])
def test_the_mismatch_of_quantised_samples_is_told_and_corrected(weights, kv, config, model):
  rollout = dataclasses.replace(config.rollout, weights=weights, kv=kv)
  config = dataclasses.replace(config, rollout=rollout)
  learner, scheduler = assembly.make_learner(config, model), assembly.make_scheduler(config, model)
  scheduler.swap_params(learner.snapshot(), 0)
  prompts = assembly.make_prompts(config)
  sampling = sources.train_sampling(config, model.tokenizer.stop_token_ids)
  with sources.make_chain(config.rewards) as chain:
    groups = [
      draw(scheduler, chain, model, prompts.iterator.next(), i, 8, sampling) for i in range(3)
    ]
  gaps = np.concatenate(
    [
      (score - trajectory.behaviour_log_probs_t)[trajectory.mask_t]
      for group, scores in zip(groups, learner.score(groups), strict=True)
      for trajectory, score in zip(group.trajectories, scores, strict=True)
    ]
  ).astype(np.float64)
  assert (
    np.abs(gaps).max() > 1e-3
  )  # ten times what an engine of the learner's own weights may differ
  metrics, weight = learner.train(groups).result(), np.exp(gaps)
  kl, largest = (weight - 1 - gaps).mean(), np.abs(gaps).max()
  assert metrics['sampler_kl'] == pytest.approx(kl, rel=0.05)
  assert metrics['sampler_log_ratio_max'] == pytest.approx(largest, rel=1e-3)
  assert metrics['correction_mean'] == pytest.approx(np.minimum(weight, 2.0).mean(), rel=1e-5)
  assert metrics['correction_mean'] != 1.0 and metrics['ratio_max'] == 1.0


@pytest.mark.slow
def test_quantised_rollouts_go_through_the_whole_run(config, model, tmp_path):
  rollout = dataclasses.replace(config.rollout, weights='int8_dynamic', kv='fp8')
  run_loop(dataclasses.replace(config, rollout=rollout), model, tmp_path)
  lines = map(json.loads, (tmp_path / 'metrics.jsonl').read_text().splitlines())
  steps = [line for line in lines if 'train/sampler_kl' in line]
  assert len(steps) == STEPS
  for line in steps:
    assert line['train/sampler_kl'] > 0 and line['train/sampler_log_ratio_max'] > 1e-3
    assert line['train/correction_mean'] != 1.0
    assert line['perf/compilations'] == 0.0


def test_mistakes_in_prompts_and_context(config):
  rollout = dataclasses.replace(config.rollout, max_prompt_tokens=1)
  prompts = assembly.make_prompts(config)
  with pytest.raises(PromptTooLongError, match='config.data.train has 2 tokens, more than'):
    assembly.load_checked_model(
      dataclasses.replace(config, rollout=rollout), {'train': prompts.train}
    )
  rollout = dataclasses.replace(config.rollout, max_tokens=100)
  with pytest.raises(ConfigError, match='= 108 exceeds the context'):
    assembly.load_checked_model(dataclasses.replace(config, rollout=rollout), {})
  section = dataclasses.replace(config.model, kernels='pallas')
  with pytest.raises(ConfigError, match='kernels=pallas is absent: it is for TPU and Hopper GPUs'):
    assembly.load_checked_model(dataclasses.replace(config, model=section), {})


def _with_box(config, advantage, **rollout):
  objective = dataclasses.replace(config.objective, advantage=advantage)
  return dataclasses.replace(
    config, objective=objective, rollout=dataclasses.replace(config.rollout, **rollout)
  )


def test_the_coordinator_asks_for_what_the_objective_compares_with(config):
  alone = _with_box(config, 'greedy_baseline', group_size=1)
  for changed, greedy, size in ((config, False, 4), (alone, True, 1)):
    coordinator = assembly.make_coordinator(changed, assembly.make_prompts(changed).iterator)
    coordinator.on_published(0)
    lease = coordinator.lease('w')
    assert (lease.greedy, lease.group_size) == (greedy, size)
  with pytest.raises(ValueError, match='at least min_group_size'):
    small = _with_box(config, 'group_center', group_size=1)
    assembly.make_coordinator(small, assembly.make_prompts(small).iterator)


@pytest.mark.slow
def test_greedy_samples_go_through_the_whole_run(config, model, tmp_path):
  _, learner, batches, coordinator = run_loop(
    _with_box(config, 'greedy_baseline', group_size=2), model, tmp_path
  )
  groups = [group for batch in batches for group in batch]
  counts = coordinator.counts()
  assert counts['trained'] == 2 * len(groups) and counts['baseline'] == len(groups)
  assert counts['dropped_failed'] == 0 and learner.version == STEPS
  for batch, version in zip(batches, range(STEPS), strict=True):
    for group in batch:
      assert group.greedy.oldest_version == version
      assert (group.greedy.behaviour_log_probs_t == 0).all()  # the one token that greedy can take
    values = batch_metrics(batch, 1.0)
    assert values['reward/greedy'] == pytest.approx(np.mean([g.greedy.reward.value for g in batch]))


def test_free_keys_bind_steps_to_a_schedule(config):
  assert 'steps' in assembly.free_keys(config)
  learner = dataclasses.replace(config.learner, decay='cosine')
  assert 'steps' not in assembly.free_keys(dataclasses.replace(config, learner=learner))


def test_account_of_a_checkpoint():
  assert account_from(None) == Account()
  saved = dataclasses.asdict(Account(held_out_before=0.25, train_seconds=3.0))
  assert account_from({'account': saved}).held_out_before == 0.25
  with pytest.raises(CheckpointError, match='no readable account'):
    account_from({'account': {'colour': 1}})


@pytest.mark.slow
def test_batch_metrics_by_hand(loop_run):
  groups = loop_run[2][0]
  values = batch_metrics(groups, 2.0)
  rewards = [t.reward.value for g in groups for t in g.trajectories]
  lengths = [t.num_sampled for g in groups for t in g.trajectories]
  assert values['reward/mean'] == pytest.approx(np.mean(rewards))
  assert values['reward/std'] == pytest.approx(np.std(rewards))
  assert values['rollout/response_length'] == pytest.approx(np.mean(lengths))
  assert values['perf/tokens_per_s'] == pytest.approx(sum(lengths) / 2.0)
  assert values['rollout/several_versions'] == 0  # on-policy
  assert threading.active_count() < 20
