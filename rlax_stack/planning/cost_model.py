"""Times that nobody measured: how long a step would take if devices worked at their makers' figures.

Two bounds are given: computing and sending one after the other, and both at once. The truth of a tuned program lies
above the second. Decoding is taken to wait for memory alone. Everything here is arithmetic over numbers that were
counted.
"""

import dataclasses
import math

import jax

from rlax_stack.models import decoder
from rlax_stack.models.config import ModelConfig
from rlax_stack.planning.learner_programs import ProgramFigures
from rlax_stack.planning.topologies import DeviceKind
from rlax_stack.rollout.engine_state import EngineConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
  """Seconds of one program on one device.

  compute_s: its FLOPs at the maker's rate. send_s: its collectives over one pair of links. serial_s: both, one
  after the other. overlapped_s: the longer one.
  """

  compute_s: float
  send_s: float

  @property
  def serial_s(self) -> float:
    """Upper of the two bounds."""
    return self.compute_s + self.send_s

  @property
  def overlapped_s(self) -> float:
    """Lower of the two bounds."""
    return max(self.compute_s, self.send_s)


def step_time(figures: ProgramFigures, kind: DeviceKind, num_devices: int) -> StepTime:
  """Of a compiled program."""
  return StepTime(
    compute_s=figures.flops / num_devices / kind.matmul_flops,
    send_s=sum(figures.counts.sent_bytes.values()) / kind.link_bytes_s,
  )


def num_parameters(config: ModelConfig) -> int:
  """Numbers in the model."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder.abstract_params(config)))


def active_parameters(config: ModelConfig) -> int:
  """Numbers that a token goes through: all but the experts that it does not take."""
  idle = config.num_experts - config.experts_per_token
  return num_parameters(config) - config.num_layers * idle * _expert(config)


def model_flops(
  config: ModelConfig,
  *,
  tokens: int,
  targets: int,
  pairs: float,
  backward: bool = True,
  weight_gradients: bool = True,
) -> float:
  """FLOPs that a forward pass, and a backward one, cannot do without: nothing recomputed, no padding of blocks.

  Args:
    config: of the model.
    tokens: placed in rows.
    targets: of them, those that reach the LM head.
    pairs: of a query and a key that it sees, in one layer.
    backward: with the passes of gradients: of what goes through the model, and of its weights.
    weight_gradients: False leaves the latter out, for frozen weights; an adapter's own products are not counted.
  """
  hidden, head = config.hidden_size, config.head_dim
  attention = _attention(config)
  feed_forward = 3 * hidden * config.intermediate_size
  if config.num_experts:
    feed_forward = hidden * config.num_experts + config.experts_per_token * _expert(config)
  layer = attention + feed_forward
  products = 2.0 * config.num_layers * layer * tokens + 2.0 * config.vocab_size * hidden * targets
  scores = 4.0 * config.num_layers * config.num_heads * head * pairs
  if not backward:
    return products + scores
  return (3.0 if weight_gradients else 2.0) * products + 3.0 * scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
  """How long samples are, in tokens: log-normal with this mean, 95th percentile over the 5th `spread`."""

  mean: float
  spread: float = 1.0

  @property
  def seen(self) -> float:
    """Tokens of its own that a decoding sample has on average: E[n²] / 2 E[n], since long ones decode longer."""
    sigma = math.log(self.spread) / (
      2 * 1.6449
    )  # the 95th percentile lies 1.6449 sigma above the median
    return self.mean * math.exp(sigma**2) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineBytes:
  """What a rollout engine holds on its device."""

  weights: float
  prefix_kv: float
  suffix_kv: float
  logits: float

  @property
  def total(self) -> float:
    """All of it."""
    return self.weights + self.prefix_kv + self.suffix_kv + self.logits


def engine_bytes(config: ModelConfig, sizes: EngineConfig, itemsize: int) -> EngineBytes:
  """Of an engine of these sizes on an accelerator; a quantised number takes one byte and its scales a little."""
  weight = itemsize if sizes.weights == 'same' else 1
  token, embeddings = _token_bytes(config, sizes, itemsize), _embeddings(config)
  layers = num_parameters(config) - embeddings
  return EngineBytes(
    weights=embeddings * itemsize + layers * weight,
    prefix_kv=token * sizes.prefix_pages * sizes.page_size,
    suffix_kv=token * sizes.suffix_pages * sizes.suffix_page_size,
    logits=4.0 * sizes.slots * config.vocab_size,
  )


def decode_step_s(
  config: ModelConfig,
  sizes: EngineConfig,
  kind: DeviceKind,
  *,
  group_size: int,
  itemsize: int,
  lengths: Lengths,
) -> float:
  """Seconds of a decode step of full slots: weights once, each prompt once for the rows that share it, and what samples
  have so far. Of a mixture the experts that some row takes, if all are as likely.
  """
  held = engine_bytes(config, sizes, itemsize)
  token = _token_bytes(config, sizes, itemsize)
  rows = min(group_size, sizes.rows_per_block)
  prompts = math.ceil(sizes.slots / rows) * sizes.max_prompt_tokens
  read = token * (prompts + sizes.slots * min(lengths.seen, sizes.max_new_tokens))
  layers = held.weights - _embeddings(config) * itemsize
  if config.num_experts:
    idle = (1 - config.experts_per_token / config.num_experts) ** sizes.slots
    experts = config.num_layers * config.num_experts * _expert(config)
    layers = (num_parameters(config) - _embeddings(config) - idle * experts) * itemsize
  head = config.vocab_size * config.hidden_size * itemsize
  return (layers + head + read) / kind.hbm_bytes_s


def _attention(config: ModelConfig) -> int:
  """Numbers in the projections of one layer."""
  return config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)


def _expert(config: ModelConfig) -> int:
  """Numbers in one expert of one layer."""
  return 3 * config.hidden_size * config.moe_intermediate_size


def _embeddings(config: ModelConfig) -> int:
  """Numbers in the embeddings and the LM head."""
  return config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)


def _token_bytes(config: ModelConfig, sizes: EngineConfig, itemsize: int) -> float:
  """Of the keys and values of one token in all layers."""
  kv = itemsize if sizes.kv == 'same' else 1 + 4 / config.head_dim
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv
