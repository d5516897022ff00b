"""Builds every part of a run from its config and connects them. The only other place that sees all is launch.

Nothing here decides anything: values come from the config, the order of calls is in train_loop.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rlax_stack.config import RunConfig, to_plain
from rlax_stack.data.iterator import PromptIterator
from rlax_stack.data.prompt_history import PromptHistory
from rlax_stack.data.source import PromptSource
from rlax_stack.errors import ConfigError, DataError, PromptTooLongError
from rlax_stack.fleet.coordinator import Coordinator
from rlax_stack.learner.learner import Learner
from rlax_stack.learner.optimizer import OptimizerSettings
from rlax_stack.learner.precision import resolve_compute_dtype
from rlax_stack.learner.row_plan import plan_rows
from rlax_stack.learner.scoring import ForwardSettings
from rlax_stack.learner.settings import LearnerSettings
from rlax_stack.models.adapter import AdapterSettings, adapted_leaves, merge
from rlax_stack.models.frozen import freeze
from rlax_stack.models.load import LoadedModel, load_model
from rlax_stack.models.remat import check_offload
from rlax_stack.objective_rules import resolve_objective
from rlax_stack.objectives.router import RouterLoss
from rlax_stack.other_models import load_teacher, make_other_context
from rlax_stack.pallas_kernels import dispatch
from rlax_stack.pallas_kernels.decode_work import rows_per_read
from rlax_stack.pallas_kernels.self_test import check_kernels
from rlax_stack.rewards.chain import RewardChain
from rlax_stack.rollout.answer_store import AnswerStore
from rlax_stack.rollout.engine import Engine
from rlax_stack.rollout.engine_state import EngineConfig
from rlax_stack.rollout.requests import changes_logits
from rlax_stack.rollout.scheduler import Scheduler
from rlax_stack.rollout.strategies import make_strategy
from rlax_stack.rollout.strategies.plan import Generate, Limits, Task, carry_out
from rlax_stack.rollout.trajectory import scored, text_places
from rlax_stack.rollout.worker import RolloutWorker
from rlax_stack.sharding import make_mesh, row_shards
from rlax_stack.sources import eval_sampling, make_sources, train_sampling
from rlax_stack.teacher_context import teacher_prompt
from rlax_stack.types import Group, Prompt

_PROBES = (
  'Solve 12 + 7.',
  'def f(x): return x ** 2',
  'naïve café 数学',
)  # teacher and policy read alike
_HELD_OUT_IDS = 1 << 31  # group ids of evaluations, apart from those of training

# A resumed run may differ in these: they change when things are saved, shown or given up, or how long
# the run is, and no trained value of the steps that both runs have.
FREE_KEYS = (
  'steps',
  'checkpoint',
  'eval',
  'plan',
  'profile',
  'serve',
  'observe',
  'fleet.batch_timeout_s',
  'fleet.lease_timeout_s',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """The two sources of a run and the position in the training one."""

  train: PromptSource
  held_out: PromptSource
  iterator: PromptIterator


def make_prompts(config: RunConfig) -> Prompts:
  """The sources of the config; needs no device.

  Raises:
    DataError: a source that is missing or empty, or nothing left to train on.
  """
  train, held_out = make_sources(config)
  if not len(held_out):
    raise DataError('config.data.eval holds no prompt. Give another path or a larger size.')
  return Prompts(train=train, held_out=held_out, iterator=PromptIterator(train, seed=config.seed))


def load_checked_model(config: RunConfig, prompts: Mapping[str, Sequence[Prompt]]) -> LoadedModel:
  """The model, and the promise that every prompt and sample fits its context.

  Args:
    config: of the run.
    prompts: the prompts to be used, by their section in config.data.

  Raises:
    ModelFileError: see `load_model`.
    PromptTooLongError: the first prompt longer than config.rollout.max_prompt_tokens.
    ConfigError: prompt and sample together exceed the model's context, or kernels that are absent here.
    KernelError: kernels whose results on this device are wrong.
  """
  _check_kernels(config.model.kernels)
  model = load_model(config.model.path)
  check_context(config, model)
  limit = config.rollout.max_prompt_tokens
  for name, source in prompts.items():
    for prompt in source:
      if name == 'train' and config.learner.teacher_context:
        teacher_prompt(config, model.tokenizer, prompt)
      length = len(model.tokenizer.encode_chat(prompt.messages))
      if length > limit:
        raise PromptTooLongError(
          f'prompt {prompt.prompt_id} of config.data.{name} has {length} tokens, more than '
          f'config.rollout.max_prompt_tokens={limit}. Raise it, or drop that prompt.'
        )
  return model


def check_context(config: RunConfig, model: LoadedModel) -> None:
  """Raises ConfigError where prompt and sample together exceed the model's context."""
  limit, sampled = config.rollout.max_prompt_tokens, _limits(config).context
  if limit + sampled > model.config.max_context:
    raise ConfigError(
      f'config.rollout.max_prompt_tokens + {sampled} tokens after it = {limit + sampled} exceeds the context of '
      f'{config.model.path}, {model.config.max_context} tokens. Lower one of them.'
    )


def adapter_settings(config: RunConfig) -> AdapterSettings | None:
  """The adapter that the config trains; None where it trains all weights."""
  section = config.learner.adapter
  if section.kind == 'none':
    return None
  return AdapterSettings(
    kind=section.kind,
    rank=section.rank,
    alpha=section.alpha,
    targets=section.targets,
    base=section.base,
    seed=config.seed,
  )


def with_frozen_weights(config: RunConfig, model: LoadedModel) -> LoadedModel:
  """The model with its weights as an adapter has them under it, for learner and worker to share.

  Without an adapter it stays as it is.

  Raises:
    ConfigError: targets or a rank that the model has no place for.
  """
  adapter = adapter_settings(config)
  if adapter is None:
    return model
  adapted_leaves(model.config, adapter)
  return dataclasses.replace(model, params=freeze(model.params, adapter.base))


def _limits(config: RunConfig) -> Limits:
  return make_strategy(config.rollout.strategy).limits(config.rollout.max_tokens)


def _check_kernels(kernels: str) -> None:
  device = dispatch.target_device(None)
  absent = dispatch.no_pallas(device, on_gpu=True)
  if kernels == 'pallas' and absent:
    raise ConfigError(f'config.model.kernels=pallas is absent: {absent}. Set it to auto or xla.')
  if kernels != 'xla':
    check_kernels(kernels)


def free_keys(config: RunConfig) -> tuple[str, ...]:
  """Config keys that a resumed run may change; a schedule over `steps` binds them."""
  if config.learner.decay == 'constant':
    return FREE_KEYS
  return tuple(key for key in FREE_KEYS if key != 'steps')


def make_learner(config: RunConfig, model: LoadedModel) -> Learner:
  """The learner on its mesh. Takes `mesh` many devices, the first ones."""
  section = config.learner
  sizes = to_plain(section.mesh)
  wanted = math.prod(sizes.values())
  available = jax.devices()
  mesh = make_mesh(sizes, available[:wanted] if wanted <= len(available) else available)
  dtype = resolve_compute_dtype(config.model.compute_dtype)
  check_offload(section.remat, mesh.devices.flat[0])
  settings, teacher = learner_settings(config, dtype), load_teacher(config, model)
  other = make_other_context(config, model, teacher)
  return Learner(model.config, model.params, settings, mesh, teacher=teacher, other_context=other)


def learner_settings(config: RunConfig, compute_dtype: Any) -> LearnerSettings:
  """What the config says of the learner, with activations in `compute_dtype`."""
  section, objective = config.learner, resolve_objective(config)
  critic = objective.critic_settings
  return LearnerSettings(
    rows=plan_rows(
      groups_per_batch=config.rollout.groups_per_step,
      group_size=config.rollout.group_size,
      max_prompt_tokens=config.rollout.max_prompt_tokens,
      max_tokens=_limits(config).span,
      row_length=section.row_length,
      micro_batch_tokens=section.micro_batch_tokens,
      data_parallel=row_shards(to_plain(section.mesh)),
      context=section.mesh.context,
      bootstrap=critic is not None and critic.bootstrap,
    ),
    forward=ForwardSettings(
      compute_dtype=compute_dtype,
      remat=section.remat,
      temperature=config.rollout.temperature,
      kernels=config.model.kernels,
      adapter=adapter_settings(config),
    ),
    objective=objective,
    optimizer=_optimizer_settings(config, critic.pretrain_updates if critic else 0),
    updates_per_batch=section.updates_per_batch,
    max_skipped_in_row=section.max_skipped_steps,
    router=RouterLoss(aux_coef=section.router_aux_coef, z_coef=section.router_z_coef),
  )


def _optimizer_settings(config: RunConfig, pretrain_updates: int) -> OptimizerSettings:
  section, rounded = config.learner, config.learner.optimizer_dtype == 'bfloat16'
  return OptimizerSettings(
    name=section.optimizer,
    learning_rate=section.learning_rate,
    warmup_steps=section.warmup_steps * section.updates_per_batch,
    decay=section.decay,
    total_steps=config.steps * section.updates_per_batch - pretrain_updates,
    b1=section.beta1,
    b2=section.beta2,
    eps=section.epsilon,
    weight_decay=section.weight_decay,
    momentum=section.momentum,
    max_grad_norm=section.max_grad_norm,
    state_dtype=section.optimizer_dtype,
    gradient_dtype=section.gradient_dtype,
    seed=config.seed if rounded else 0,  # other programs are the same for every seed
  )


def make_coordinator(
  config: RunConfig,
  iterator: PromptIterator,
  *,
  num_samples: int = 0,
  min_sizes: Mapping[str, int] | None = None,
) -> Coordinator:
  """The coordinator over the training prompts; with roles, the samples of a group and the least usable ones by role."""
  tags, wanted = resolve_objective(config).tags, _limits(config).history
  return Coordinator(
    iterator.next,
    group_size=num_samples or config.rollout.group_size,
    groups_per_batch=config.rollout.groups_per_step,
    groups_in_flight=config.rollout.groups_in_flight,
    max_staleness=config.fleet.max_staleness,
    lease_timeout_s=config.fleet.lease_timeout_s,
    min_group_size=min_sizes or (2 if 'group' in tags else 1),
    greedy='greedy' in tags,
    max_reward_failure_fraction=config.rewards.max_failure_fraction,
    prompt_state=iterator.get_state,
    history=None if wanted is None else PromptHistory(wanted, seed=config.seed),
  )


def engine_sizes(config: RunConfig, *, serving: bool = False, dtype: Any = None) -> EngineConfig:
  """The static sizes of the rollout engine.

  `serving` makes room for all that requests of an endpoint may ask for; `dtype` stands for the compute dtype that the
  config names, on a machine that is not this one.
  """
  rollout, limits = config.rollout, _limits(config)
  controls = changes_logits(train_sampling(config, ())) or (serving and not rollout.max_draft)
  # What requests of an endpoint share is not known beforehand.
  group, prompt = (8 if serving else rollout.group_size), rollout.max_prompt_tokens
  sharing = rows_per_read(group, prompt, limits.request)
  sizes = EngineConfig(
    slots=rollout.slots,
    max_prompt_tokens=rollout.max_prompt_tokens + limits.prefix,
    max_new_tokens=limits.request,
    chunk_steps=rollout.decode_chunk,
    prefill_chunk=rollout.prefill_chunk,
    prefill_budget=rollout.prefill_budget,
    rows_per_block=sharing,
    max_draft=rollout.max_draft,
    draft_weights=rollout.draft_weights,
    draft_rows=rollout.draft_rows,
    logit_controls=controls,
    max_logit_bias=300 if serving else 16,
    max_top_log_probs=20 if serving else limits.top_log_probs,
    kept_tokens=0 if serving else rollout.kept_tokens,
    record_experts=rollout.router_replay and not serving,
    compute_dtype=dtype or resolve_compute_dtype(config.model.compute_dtype),
    weights=rollout.weights,
    kv=rollout.kv,
    kernels=config.model.kernels,
  )
  pages = max(sizes.pages_per_sample, math.ceil(rollout.kv_fraction * sizes.suffix_pages))
  return dataclasses.replace(sizes, suffix_pages=pages)


def make_scheduler(config: RunConfig, model: LoadedModel, *, serving: bool = False) -> Scheduler:
  """The rollout engine with its scheduler, sized by config.rollout; see `engine_sizes`."""
  return Scheduler(
    Engine(model.config, engine_sizes(config, serving=serving)),
    run_seed=config.seed,
    decode_text=model.tokenizer.decode,
    swap_mode=config.rollout.swap_mode,
  )


def make_worker(config: RunConfig, model: LoadedModel, chain: RewardChain) -> RolloutWorker:
  """The rollout worker of the embedded runtime."""
  drafts = config.rollout.answer_drafts
  return RolloutWorker(
    make_scheduler(config, model),
    tokenizer=model.tokenizer,
    score=chain.score,
    sampling=train_sampling(config, model.tokenizer.stop_token_ids),
    strategy=make_strategy(config.rollout.strategy),
    merge=merging(config, model),
    answers=None if drafts == 'none' else AnswerStore(coupled=drafts == 'coupled'),
  )


def merging(config: RunConfig, model: LoadedModel) -> Callable[[Any], Any] | None:
  """Makes the weights to serve of a published adapter; None where whole weights are published."""
  adapter = adapter_settings(config)
  if adapter is None:
    return None
  dtype, device = resolve_compute_dtype(config.model.compute_dtype), jax.local_devices()[0]
  base = jax.device_put(freeze(model.params, adapter.base), device)
  # The learner may shard the adapter over devices; an engine decodes on one.
  return lambda published: merge(jax.device_put(published, device), base, adapter, dtype)


def held_out_groups(
  config: RunConfig,
  model: LoadedModel,
  chain: RewardChain,
  prompts: Sequence[Prompt],
  generate: Generate,
) -> list[Group]:
  """Samples and scores held-out prompts: config.eval.samples of each.

  Args:
    config: of the run.
    model: for its tokenizer.
    chain: scores the samples.
    prompts: held out.
    generate: draws samples of requests, in order.

  Returns:
    One group per prompt. The same weights give the same samples at every call.
  """
  sampling, count = eval_sampling(config, model.tokenizer.stop_token_ids), config.eval.samples
  strategy = make_strategy(config.rollout.strategy).for_evaluation
  tasks = [
    Task(
      group_id=_HELD_OUT_IDS + index,
      prompt=prompt,
      prompt_tokens=model.tokenizer.encode_chat(prompt.messages),
      samplings=(sampling,) * count,
      group_size=count,
      version=0,
      tokenizer=model.tokenizer,
    )
    for index, prompt in enumerate(prompts)
  ]
  drawn = carry_out((strategy.plan(task) for task in tasks), generate)
  texts = [model.tokenizer.decode(t.tokens[text_places(t)].tolist()) for t in drawn]
  rewards = chain.score(texts, [prompts[t.group_id - _HELD_OUT_IDS] for t in drawn])
  trajectories = [
    scored(trajectory, text, reward, model.tokenizer.decode)
    for trajectory, text, reward in zip(drawn, texts, rewards, strict=True)
  ]
  return [
    Group(
      group_id=task.group_id,
      prompt=task.prompt,
      prompt_tokens=task.prompt_tokens,
      trajectories=tuple(trajectories[index * count : (index + 1) * count]),
    )
    for index, task in enumerate(tasks)
  ]
