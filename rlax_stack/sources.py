"""From config sections to prompt sources, verifiers and sampling parameters: plain translation, no state."""

from typing import Any

from rlax_stack.config import RewardsSection, RunConfig, SourceSection
from rlax_stack.data.factory import build_source
from rlax_stack.data.source import PromptSource
from rlax_stack.data.split import exclude
from rlax_stack.rewards.chain import RewardChain, build_chain
from rlax_stack.types import SamplingParams


def make_source(section: SourceSection) -> PromptSource:
  """The prompts that a section of the config names."""
  options: dict[str, Any] = {
    'prompt_template': section.prompt_template,
    'system_prompt': section.system_prompt or None,
  }
  if section.kind == 'reasoning_gym':
    options |= {'task': section.task, 'size': section.size, 'seed': section.seed}
    return build_source(section.kind, task_kwargs=dict(section.task_options), **options)
  options |= {'path': section.path, 'limit': section.size or None}
  if section.kind == 'gsm8k':
    return build_source(section.kind, subset=section.split, **options)
  return build_source(section.kind, answer_field=section.answer_field, **options)


def make_sources(config: RunConfig) -> tuple[PromptSource, PromptSource]:
  """Training prompts and held-out prompts.

  Raises:
    DataError: a source that is missing or empty, or training prompts that are all held out.
  """
  train, held_out = make_source(config.data.train), make_source(config.data.eval)
  if not config.data.exclude_eval:
    return train, held_out
  return exclude(train, held_out), held_out


def make_chain(section: RewardsSection) -> RewardChain:
  """The verifiers of the config; the keys of `verifiers` are their labels and, by default, names."""
  specs = [
    {'name': label, **options, 'label': label} for label, options in section.verifiers.items()
  ]
  return build_chain(specs, deadline_s=section.deadline_s, num_processes=section.processes)


def train_sampling(config: RunConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
  """How training samples are drawn."""
  rollout = config.rollout
  return SamplingParams(
    temperature=rollout.temperature,
    top_k=rollout.top_k,
    top_p=rollout.top_p,
    min_p=rollout.min_p,
    repetition_penalty=rollout.repetition_penalty,
    presence_penalty=rollout.presence_penalty,
    frequency_penalty=rollout.frequency_penalty,
    min_tokens=rollout.min_tokens,
    max_tokens=rollout.max_tokens,
    stop_token_ids=stop_token_ids,
    stop_strings=rollout.stop_strings,
    seed=config.seed,
  )


def eval_sampling(config: RunConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
  """How held-out samples are drawn: the model's own distribution at the evaluation's temperature."""
  return SamplingParams(
    temperature=config.eval.temperature,
    max_tokens=config.rollout.max_tokens,
    stop_token_ids=stop_token_ids,
    stop_strings=config.rollout.stop_strings,
    seed=config.seed,
  )
