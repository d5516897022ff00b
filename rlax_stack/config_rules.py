"""All rules on config values and their combinations, checked before a device is touched."""

from collections.abc import Callable, Iterator
from typing import Any

from rlax_stack.config import RunConfig, nearest
from rlax_stack.errors import ConfigError
from rlax_stack.evaluation import VOTES
from rlax_stack.learner.optimizer import DTYPES, OPTIMIZERS, SCHEDULES
from rlax_stack.learner.row_plan import row_length_problem
from rlax_stack.models.adapter import KINDS
from rlax_stack.models.frozen import PRECISIONS
from rlax_stack.models.remat import REMAT_POLICIES
from rlax_stack.objective_rules import filters, objective_problems, resolve_objective
from rlax_stack.role_config import KINDS as KINDS_OF_ROLES
from rlax_stack.role_config import role_problems
from rlax_stack.rollout.strategies import make_strategy
from rlax_stack.rollout.strategies.independent import Independent
from rlax_stack.sharding import MESH_AXES

_CHOICES = {
  'model.compute_dtype': ('auto', 'float32', 'bfloat16'),
  'model.kernels': ('auto', 'pallas', 'xla'),
  'data.train.kind': ('jsonl', 'gsm8k', 'reasoning_gym'),
  'data.eval.kind': ('jsonl', 'gsm8k', 'reasoning_gym'),
  'data.train.split': ('train', 'test'),
  'data.eval.split': ('train', 'test'),
  'learner.optimizer': tuple(OPTIMIZERS),
  'learner.optimizer_dtype': tuple(DTYPES),
  'learner.gradient_dtype': tuple(DTYPES),
  'learner.decay': SCHEDULES,
  'learner.remat': tuple(REMAT_POLICIES),
  'learner.adapter.kind': ('none', *KINDS),
  'learner.adapter.base': tuple(PRECISIONS),
  'roles.kind': KINDS_OF_ROLES,
  'fleet.runtime': ('local',),
  'rollout.weights': ('same', 'int8', 'fp8', 'int8_dynamic'),
  'rollout.draft_weights': ('none', 'int8', 'fp8', 'int8_dynamic'),
  'rollout.answer_drafts': ('none', 'independent', 'coupled'),
  'rollout.kv': ('same', 'int8', 'fp8'),
  'rollout.swap_mode': ('in_place', 'retract', 'drain'),
  'eval.vote': ('none', *VOTES),
  'observe.progress': ('auto', 'live', 'plain', 'off'),
}

_POSITIVE = (
  'steps',
  'rewards.deadline_s',
  'rewards.processes',
  'rollout.groups_per_step',
  'rollout.group_size',
  'rollout.max_prompt_tokens',
  'rollout.max_tokens',
  'rollout.slots',
  'rollout.decode_chunk',
  'rollout.repetition_penalty',
  'rollout.kv_fraction',
  'rollout.prefill_budget',
  'learner.learning_rate',
  'learner.epsilon',
  'learner.max_grad_norm',
  'learner.updates_per_batch',
  'learner.micro_batch_tokens',
  'learner.max_skipped_steps',
  'learner.adapter.rank',
  'learner.adapter.alpha',
  'fleet.lease_timeout_s',
  'fleet.batch_timeout_s',
  'checkpoint.keep',
  'eval.samples',
  'plan.dcn_gb_s',
  'serve.max_connections',
  'serve.max_body_bytes',
  'serve.request_timeout_s',
  'serve.io_timeout_s',
)

_NOT_NEGATIVE = (
  'seed',
  'data.train.size',
  'data.eval.size',
  'rollout.groups_in_flight',
  'rollout.temperature',
  'rollout.top_k',
  'rollout.min_p',
  'rollout.kept_tokens',
  'rollout.min_tokens',
  'rollout.prefill_chunk',
  'rollout.max_draft',
  'rollout.draft_rows',
  'learner.row_length',
  'learner.warmup_steps',
  'learner.weight_decay',
  'learner.router_aux_coef',
  'learner.router_z_coef',
  'fleet.max_staleness',
  'checkpoint.every_steps',
  'eval.every_steps',
  'eval.temperature',
  'plan.price',
  'plan.mean_tokens',
  'profile.peak_tflops',
  'serve.max_waiting',
  'serve.drain_timeout_s',
  'serve.follow_s',
  'observe.samples_per_step',
)

_FRACTIONS = (
  'rewards.max_failure_fraction',
  'rollout.min_p',
  'rollout.kv_fraction',
  'learner.beta1',
  'learner.beta2',
  'learner.momentum',
)


def check(config: RunConfig) -> None:
  """Raises ConfigError for the first value or combination that cannot work."""
  for path, choices in _CHOICES.items():
    value = _get(config, path)
    if value not in choices:
      raise ConfigError(
        f'config.{path} must be one of {", ".join(choices)}, got {value!r}.{nearest(value, choices)}'
      )
  _check_numbers(config, _POSITIVE, lambda value: value > 0, 'above 0')
  _check_numbers(config, _NOT_NEGATIVE, lambda value: value >= 0, '0 or more')
  _check_numbers(config, _FRACTIONS, lambda value: 0 <= value <= 1, 'from 0 to 1')
  for problem in _combinations(config):
    raise ConfigError(problem)


def _get(config: RunConfig, path: str) -> Any:
  value: Any = config
  for name in path.split('.'):
    value = getattr(value, name)
  return value


def _check_numbers(
  config: RunConfig, paths: tuple[str, ...], holds: Callable[[Any], bool], expected: str
) -> None:
  for path in paths:
    value = _get(config, path)
    if not holds(value):  # NaN never holds
      raise ConfigError(f'config.{path} must be {expected}, got {value!r}.')


def _combinations(config: RunConfig) -> Iterator[str]:
  """Every rule that takes more than one look at one value; yields what is wrong."""
  yield from _name_rules(config)
  yield from _source_rules(config)
  yield from _rollout_rules(config)
  yield from _strategy_rules(config)
  yield from objective_problems(config)
  yield from _learner_rules(config)
  yield from _adapter_rules(config)
  yield from _eval_rules(config)
  yield from _plan_rules(config)
  for step in config.profile.steps:
    if not 1 <= step <= config.steps:
      yield f'config.profile.steps holds {step}: steps go from 1 to config.steps={config.steps}.'
  yield from _serve_rules(config)
  yield from role_problems(config, check)


def _name_rules(config: RunConfig) -> Iterator[str]:
  name = config.name
  if not name or name in ('.', '..') or '/' in name or '\\' in name:
    yield f'config.name must be one plain folder name, got {name!r}.'


def _source_rules(config: RunConfig) -> Iterator[str]:
  for name, source in (('train', config.data.train), ('eval', config.data.eval)):
    if source.kind in ('jsonl', 'gsm8k') and not source.path:
      yield (
        f'config.data.{name}.kind={source.kind} needs a path. Set config.data.{name}.path to the '
        f'{"file" if source.kind == "jsonl" else "folder that holds train.jsonl and test.jsonl"}.'
      )
    if source.kind == 'reasoning_gym' and source.size < 1:
      yield f'config.data.{name}.size must be above 0 for reasoning_gym, got {source.size}.'
  if not config.rewards.verifiers:
    yield 'config.rewards.verifiers is empty: without a verifier there is no reward.'


def _rollout_rules(config: RunConfig) -> Iterator[str]:
  rollout = config.rollout
  if not 0 < rollout.top_p <= 1:
    yield f'config.rollout.top_p must be above 0 and at most 1, got {rollout.top_p}.'
  if rollout.temperature == 0:
    yield 'config.rollout.temperature=0 samples every group G times alike. Set it above 0.'
  if rollout.min_tokens > rollout.max_tokens:
    yield (
      f'config.rollout.min_tokens={rollout.min_tokens} exceeds config.rollout.max_tokens='
      f'{rollout.max_tokens}. Lower it.'
    )
  changed = rollout.repetition_penalty != 1 or rollout.presence_penalty or rollout.frequency_penalty
  if rollout.max_draft and (changed or rollout.min_tokens):
    yield (
      f'config.rollout.max_draft={rollout.max_draft} does not go with penalties or min_tokens, which follow token by '
      'token. Set max_draft to 0 or those off.'
    )
  yield from _draft_rules(config)
  yield from _kept_rules(config)
  yield from _in_flight_rules(config)
  for name in ('presence_penalty', 'frequency_penalty'):
    value = getattr(rollout, name)
    if not -2 <= value <= 2:
      yield f'config.rollout.{name} must be from -2 to 2 (0 is off), got {value}.'


def _draft_rules(config: RunConfig) -> Iterator[str]:
  rollout = config.rollout
  for name in ('draft_weights', 'answer_drafts'):
    value = getattr(rollout, name)
    if value != 'none' and not rollout.max_draft:
      yield (
        f'config.rollout.{name}={value} proposes tokens that nothing checks with config.rollout.max_draft=0. Set '
        f'max_draft, for example to 4, or {name} to none.'
      )
  if rollout.draft_weights != 'none' and rollout.weights != 'same':
    yield (
      f'config.rollout.draft_weights={rollout.draft_weights} is a smaller copy of the weights, but config.rollout.'
      f'weights={rollout.weights} makes those small already. Set one of them to its default.'
    )
  if rollout.draft_rows and rollout.draft_weights == 'none':
    yield (
      f'config.rollout.draft_rows={rollout.draft_rows} says when a copy of the weights proposes tokens, but '
      'config.rollout.draft_weights=none makes none. Set draft_weights, for example to int8.'
    )


def _kept_rules(config: RunConfig) -> Iterator[str]:
  rollout = config.rollout
  if rollout.kept_tokens and not filters(config):
    yield (
      f'config.rollout.kept_tokens={rollout.kept_tokens} records what top_k, top_p and min_p keep, but all of them are '
      'off. Set it to 0, or one of those.'
    )
  if rollout.top_k > rollout.kept_tokens > 0:
    yield (
      f'config.rollout.kept_tokens={rollout.kept_tokens} has no room for the config.rollout.top_k={rollout.top_k} '
      f'tokens that are kept. Set it to {rollout.top_k} or more.'
    )


def _in_flight_rules(config: RunConfig) -> Iterator[str]:
  batch, staleness = config.rollout.groups_per_step, config.fleet.max_staleness
  in_flight, most = config.rollout.groups_in_flight, batch * (staleness + 1)
  if 0 < in_flight < batch:
    yield (
      f'config.rollout.groups_in_flight={in_flight} cannot fill a batch of config.rollout.groups_per_step='
      f'{batch}. Set it to {batch} or more, or to 0.'
    )
  if in_flight > most:
    yield (
      f'config.rollout.groups_in_flight={in_flight} exceeds the {most} groups that can be trained on in time with '
      f'config.fleet.max_staleness={staleness}. Lower it, or raise config.fleet.max_staleness.'
    )


def _strategy_rules(config: RunConfig) -> Iterator[str]:
  """Raises ConfigError where the strategy cannot be read."""
  rollout, strategy = config.rollout, make_strategy(config.rollout.strategy)
  for problem in strategy.problems(rollout.group_size):
    yield f'config.rollout.strategy={rollout.strategy}: {problem}'
  if isinstance(strategy, Independent):
    return
  if rollout.answer_drafts != 'none':
    yield (
      f'config.rollout.answer_drafts={rollout.answer_drafts} goes with samples of one request, not with '
      f'config.rollout.strategy={rollout.strategy}. Set it to none.'
    )
  # A sample of several requests: these look at the tokens of one.
  if rollout.presence_penalty or rollout.frequency_penalty:
    yield (
      f'presence_penalty and frequency_penalty count what one request sampled, but under config.rollout.strategy='
      f'{rollout.strategy} a sample is more than that. Set both to 0.'
    )
  if rollout.stop_strings:
    yield (
      f'a stop string may lie across two requests of a sample under config.rollout.strategy={rollout.strategy}. '
      'Set config.rollout.stop_strings=().'
    )


def _learner_rules(config: RunConfig) -> Iterator[str]:
  learner, rollout = config.learner, config.rollout
  span = make_strategy(rollout.strategy).limits(rollout.max_tokens).span
  longest = rollout.max_prompt_tokens + span
  if 0 < learner.row_length < longest:
    yield (
      f'a trajectory may have config.rollout.max_prompt_tokens + {span} = {longest} tokens, but '
      f'config.learner.row_length={learner.row_length}. Set it to {longest} or more, or to 0.'
    )
  for axis in MESH_AXES:
    if getattr(learner.mesh, axis) < 1:
      yield f'config.learner.mesh.{axis} must be 1 or more.'
  if learner.mesh.context > 1:
    problem = row_length_problem(learner.row_length, learner.mesh.context)
    if problem:
      yield problem
  if learner.optimizer == 'schedule_free' and (learner.beta1 == 0 or learner.decay != 'constant'):
    yield (
      'config.learner.optimizer=schedule_free averages weights in the place of a momentum and a schedule, '
      f'but config.learner.beta1={learner.beta1} and decay={learner.decay}. Set beta1 above 0 and '
      'decay=constant.'
    )
  if learner.warmup_steps >= config.steps:
    yield f'config.learner.warmup_steps={learner.warmup_steps} leaves no step of config.steps.'


def _adapter_rules(config: RunConfig) -> Iterator[str]:
  adapter = config.learner.adapter
  if adapter.kind == 'none':
    if adapter.base != 'float32':
      yield (
        f'config.learner.adapter.base={adapter.base} is for frozen weights, but config.learner.adapter.kind=none '
        'trains all of them. Set kind, for example to lora, or base to float32.'
      )
    return
  if not adapter.targets:
    yield "config.learner.adapter.targets is empty: nothing would be trained. Set it to ('*_proj/kernel',)."
  critic = resolve_objective(config).critic_settings
  if critic is not None and not critic.shared:
    yield (
      f'config.objective.critic={config.objective.critic} trains a whole model of its own beside '
      f'config.learner.adapter.kind={adapter.kind}. Set the critic to shared_trunk, or kind to none.'
    )


def _eval_rules(config: RunConfig) -> Iterator[str]:
  for k in config.eval.pass_at:
    if not 1 <= k <= config.eval.samples:
      yield (
        f'config.eval.pass_at holds {k}, but config.eval.samples={config.eval.samples}: pass@k needs '
        f'at least k samples and k of 1 or more.'
      )


def _plan_rules(config: RunConfig) -> Iterator[str]:
  plan, most = config.plan, config.rollout.max_tokens
  if plan.mean_tokens > most:
    yield (
      f'config.plan.mean_tokens={plan.mean_tokens} exceeds config.rollout.max_tokens={most}, which no sample does. '
      'Lower it, or set it to 0.'
    )
  if not plan.spread >= 1:
    yield f'config.plan.spread must be 1 (all lengths alike) or more, got {plan.spread}.'


def _serve_rules(config: RunConfig) -> Iterator[str]:
  serve = config.serve
  for name in ('port', 'grpc_port'):
    if not 0 <= getattr(serve, name) < 65536:
      yield f'config.serve.{name} must be from 0 to 65535, got {getattr(serve, name)}.'
  if serve.port and serve.port == serve.grpc_port:
    yield f'config.serve.port and grpc_port are both {serve.port}. Give each its own.'
  for name in ('host', 'token_variable'):
    if not getattr(serve, name):
      yield f'config.serve.{name} is empty. Set it as in configs/base.py.'
