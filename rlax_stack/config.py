"""The run's config as frozen dataclasses, made once from the locked ConfigDict of a configs/*.py file.

Every field of `configs/base.py` has its twin here and nothing has a default: what a config file does
not say does not exist. `from_config_dict` checks names and types, `config_rules.check` all values
and combinations; both run before any device is touched.
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from rlax_stack.errors import ConfigError

_frozen = dataclasses.dataclass(frozen=True, kw_only=True)


@_frozen
class ModelSection:
  """Which model, and the dtype it computes in."""

  path: str
  compute_dtype: str
  kernels: str


@_frozen
class SourceSection:
  """One prompt source."""

  kind: str
  path: str
  split: str
  prompt_template: str
  answer_field: str
  task: str
  task_options: Mapping[str, Any]
  size: int
  seed: int
  system_prompt: str


@_frozen
class DataSection:
  """Prompts trained on and prompts held out."""

  train: SourceSection
  eval: SourceSection
  exclude_eval: bool


@_frozen
class RewardsSection:
  """Verifiers by name, each with its weight and options, and the pool they run in."""

  verifiers: Mapping[str, Mapping[str, Any]]
  deadline_s: float
  processes: int
  max_failure_fraction: float


@_frozen
class RolloutSection:
  """How samples are drawn."""

  groups_per_step: int
  groups_in_flight: int
  group_size: int
  max_prompt_tokens: int
  max_tokens: int
  temperature: float
  top_k: int
  top_p: float
  min_p: float
  kept_tokens: int
  router_replay: bool
  repetition_penalty: float
  presence_penalty: float
  frequency_penalty: float
  min_tokens: int
  stop_strings: tuple[str, ...]
  slots: int
  decode_chunk: int
  kv_fraction: float
  prefill_chunk: int
  prefill_budget: int
  max_draft: int
  draft_weights: str
  draft_rows: int
  answer_drafts: str
  weights: str
  kv: str
  swap_mode: str
  strategy: str


@_frozen
class ObjectiveSection:
  """The boxes that the loss is composed of, each as `name` or `name(option=value, ...)`."""

  shaping: tuple[str, ...]
  advantage: str
  critic: str
  ratio: str
  trust_region: str
  corrections: tuple[str, ...]
  regularisers: tuple[str, ...]
  aggregation: str


@_frozen
class MeshSection:
  """Devices along each mesh axis."""

  data: int
  fsdp: int
  tensor: int
  context: int
  expert: int


@_frozen
class AdapterSection:
  """What is trained beside frozen weights, and how those are held."""

  kind: str
  rank: int
  alpha: float
  targets: tuple[str, ...]
  base: str


@_frozen
class LearnerSection:
  """The optimizer, the packed rows and the mesh."""

  optimizer: str
  optimizer_dtype: str
  gradient_dtype: str
  learning_rate: float
  warmup_steps: int
  decay: str
  weight_decay: float
  beta1: float
  beta2: float
  epsilon: float
  momentum: float
  max_grad_norm: float
  updates_per_batch: int
  row_length: int
  micro_batch_tokens: int
  remat: str
  max_skipped_steps: int
  router_aux_coef: float
  router_z_coef: float
  teacher: str
  teacher_context: str
  teacher_context_tokens: int
  adapter: AdapterSection
  mesh: MeshSection


@_frozen
class RolesSection:
  """Who else speaks beside the solver, and which policy it is."""

  kind: str
  policy: str
  answers: int
  verdicts: int
  max_tokens: int
  max_prompt_tokens: int
  weight: float
  correct_at: float
  words: tuple[str, ...]
  template: str


@_frozen
class FleetSection:
  """Where the roles run and how stale a sample may be."""

  runtime: str
  max_staleness: int
  lease_timeout_s: float
  batch_timeout_s: float


@_frozen
class CheckpointSection:
  """When the run is saved and what a resume may change."""

  every_steps: int
  keep: int
  allow_changes: bool


@_frozen
class EvalSection:
  """Held-out evaluation."""

  every_steps: int
  samples: int
  temperature: float
  pass_at: tuple[int, ...]
  correct_at: float
  vote: str


@_frozen
class PlanSection:
  """What `rlax_stack.plan` plans for."""

  topology: str
  dcn_gb_s: float
  price: float
  mean_tokens: int
  spread: float
  search: bool


@_frozen
class ProfileSection:
  """What is traced, and what utilisation is measured against."""

  steps: tuple[int, ...]
  peak_tflops: float


@_frozen
class ServeSection:
  """The serving endpoint: where it listens and what it refuses."""

  host: str
  port: int
  grpc_port: int
  token_variable: str
  max_waiting: int
  max_connections: int
  max_body_bytes: int
  request_timeout_s: float
  io_timeout_s: float
  drain_timeout_s: float
  follow_s: float


@_frozen
class ObserveSection:
  """What a person sees."""

  progress: str
  tensorboard: bool
  samples_per_step: int
  report: bool


@_frozen
class RunConfig:
  """The whole run."""

  name: str
  seed: int
  steps: int
  model: ModelSection
  data: DataSection
  rewards: RewardsSection
  rollout: RolloutSection
  objective: ObjectiveSection
  learner: LearnerSection
  roles: RolesSection
  policies: Mapping[str, Mapping[str, Any]]
  fleet: FleetSection
  checkpoint: CheckpointSection
  eval: EvalSection
  plan: PlanSection
  profile: ProfileSection
  serve: ServeSection
  observe: ObserveSection


def from_config_dict(config: ConfigDict) -> RunConfig:
  """The frozen form of a config file's ConfigDict.

  Raises:
    ConfigError: a field that is missing, unknown (with the nearest name) or of another type.
  """
  return _section(RunConfig, config, 'config')


def to_plain(config: Any) -> Any:
  """A config section as plain JSON values, for config.json and for comparing two runs."""
  if dataclasses.is_dataclass(config):
    return {f.name: to_plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
  if isinstance(config, Mapping):
    return {key: to_plain(value) for key, value in config.items()}
  if isinstance(config, tuple | list):
    return [to_plain(value) for value in config]
  return config


def overridden(section: Any, changes: Any, path: str) -> Any:
  """A section with some of its fields changed.

  Args:
    section: a dataclass of this module.
    changes: mapping of fields to values, nested as the section is.
    path: of the changes in the config, for messages.

  Raises:
    ConfigError: a field that is unknown or of another type.
  """
  if not isinstance(changes, ConfigDict | Mapping):
    raise ConfigError(f'{path} must be a section, got {changes!r}.')
  kinds = {field.name: field.type for field in dataclasses.fields(section)}
  changed = {}
  for name, value in changes.items():
    if name not in kinds:
      raise ConfigError(f'unknown field {path}.{name}.{nearest(name, kinds)}')
    kind, old = kinds[name], getattr(section, name)
    nested = dataclasses.is_dataclass(kind)
    within = f'{path}.{name}'
    changed[name] = overridden(old, value, within) if nested else _value(kind, value, within)
  return dataclasses.replace(section, **changed)


def nearest(name: str, names: Any) -> str:
  """' Did you mean ...?' for an unknown name, or the list of names where none is near."""
  names = sorted(names)
  close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
  return f' Did you mean {close[0]}?' if close else f' The names are {", ".join(names)}.'


def _section(section: type, values: Any, path: str) -> Any:
  if not isinstance(values, ConfigDict | Mapping):
    raise ConfigError(f'{path} must be a section, got {values!r}.')
  fields = {field.name: field.type for field in dataclasses.fields(section)}
  for name in values:
    if name not in fields:
      raise ConfigError(f'unknown field {path}.{name}.{nearest(name, fields)}')
  missing = sorted(set(fields) - set(values))
  if missing:
    raise ConfigError(f'{path} lacks {", ".join(missing)}. Start from configs/base.py.')
  return section(**{name: _value(fields[name], values[name], f'{path}.{name}') for name in fields})


def _value(kind: Any, value: Any, path: str) -> Any:
  if dataclasses.is_dataclass(kind):
    return _section(typing.cast(type, kind), value, path)
  origin = typing.get_origin(kind) or kind
  if issubclass(origin, Mapping):
    return _plain_mapping(value, path)
  if origin is tuple:
    return _tuple(typing.get_args(kind)[0], value, path)
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise ConfigError(f'{path} must be a {kind.__name__}, got {value!r}.')
  return value


def _tuple(kind: type, value: Any, path: str) -> tuple[Any, ...]:
  """A tuple of `kind`; one bare value is taken for a tuple of one."""
  items = value if isinstance(value, tuple | list) else (value,)
  return tuple(_value(kind, item, f'{path}[{i}]') for i, item in enumerate(items))


def _plain_mapping(value: Any, path: str) -> dict[str, Any]:
  if not isinstance(value, ConfigDict | Mapping):
    raise ConfigError(f'{path} must be a mapping, got {value!r}.')
  plain = {}
  for key, item in value.items():
    nested = isinstance(item, ConfigDict | Mapping)
    plain[key] = _plain_mapping(item, f'{path}.{key}') if nested else item
  return plain
