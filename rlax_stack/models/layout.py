"""The parameter tree of a config, leaf by leaf, and the names its leaves have in model files.

One table for every importer and exporter: a path in the tree, the shape of one layer's slice, and
the name of that slice in Hugging Face and GGUF files.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from rlax_stack.models.config import ModelConfig

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """One leaf of the tree. Where `stacked`, `shape` is of one layer, `{}` in names its number.

  With `experts`, files hold one tensor of `shape` for each of so many, and a second `{}` names it.
  """

  path: Path
  shape: tuple[int, ...]
  stacked: bool
  hf_name: str
  gguf_name: str
  experts: int = 0

  def full_shape(self, config: ModelConfig) -> tuple[int, ...]:
    """Shape in the tree: with the axes of layers and experts in front where it has them."""
    experts = (self.experts,) if self.experts else ()
    return (config.num_layers, *experts, *self.shape) if self.stacked else self.shape

  def places(self, config: ModelConfig) -> Iterator[tuple[int, ...]]:
    """Where each tensor of a file lies in the leaf: (), (layer,) or (layer, expert); names take the same numbers."""
    if not self.stacked:
      return iter([()])
    return itertools.product(*map(range, self.full_shape(config)[: 2 if self.experts else 1]))


def leaves(config: ModelConfig) -> list[Leaf]:
  """Every leaf of the parameters of `config`, embedding first."""
  hidden = config.hidden_size
  queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
  result = [
    _top('embedder/embedding', (config.vocab_size, hidden), 'model.embed_tokens', 'token_embd'),
    _layer('attn_norm/scale', (hidden,), 'input_layernorm', 'attn_norm'),
    _layer('q_proj/kernel', (queries, hidden), 'self_attn.q_proj', 'attn_q'),
    _layer('k_proj/kernel', (keys, hidden), 'self_attn.k_proj', 'attn_k'),
    _layer('v_proj/kernel', (keys, hidden), 'self_attn.v_proj', 'attn_v'),
    _layer('o_proj/kernel', (hidden, queries), 'self_attn.o_proj', 'attn_output'),
  ]
  if config.attention_bias:
    result += [
      _layer('q_proj/bias', (queries,), 'self_attn.q_proj', 'attn_q', 'bias'),
      _layer('k_proj/bias', (keys,), 'self_attn.k_proj', 'attn_k', 'bias'),
      _layer('v_proj/bias', (keys,), 'self_attn.v_proj', 'attn_v', 'bias'),
    ]
  if config.qk_norm:
    result += [
      _layer('q_norm/scale', (config.head_dim,), 'self_attn.q_norm', 'attn_q_norm'),
      _layer('k_norm/scale', (config.head_dim,), 'self_attn.k_norm', 'attn_k_norm'),
    ]
  # Gemma calls by the name of the MLP's norm what norms the output of attention.
  mlp_norm = 'pre_feedforward_layernorm' if config.post_norms else 'post_attention_layernorm'
  if config.post_norms:
    after_attn, after_mlp = 'post_attention_layernorm', 'post_feedforward_layernorm'
    result += [
      _layer('post_attn_norm/scale', (hidden,), after_attn, 'post_attention_norm'),
      _layer('post_mlp_norm/scale', (hidden,), after_mlp, 'post_ffw_norm'),
    ]
  result += [
    _layer('mlp_norm/scale', (hidden,), mlp_norm, 'ffn_norm'),
    *(_mixture(config) if config.num_experts else _mlp(config)),
    _top('final_norm/scale', (hidden,), 'model.norm', 'output_norm'),
  ]
  if not config.tie_embeddings:
    result.append(_top('lm_head/kernel', (config.vocab_size, hidden), 'lm_head', 'output'))
  return result


def _mlp(config: ModelConfig) -> list[Leaf]:
  hidden, mlp = config.hidden_size, config.intermediate_size
  return [
    _layer('gate_proj/kernel', (mlp, hidden), 'mlp.gate_proj', 'ffn_gate'),
    _layer('up_proj/kernel', (mlp, hidden), 'mlp.up_proj', 'ffn_up'),
    _layer('down_proj/kernel', (hidden, mlp), 'mlp.down_proj', 'ffn_down'),
  ]


def _mixture(config: ModelConfig) -> list[Leaf]:
  """Of Qwen3-MoE where q and k have norms, of Mixtral where not; GGUF files of mixtures are refused before."""
  experts, hidden, mlp = config.num_experts, config.hidden_size, config.moe_intermediate_size
  block, *names = ('mlp', 'gate_proj', 'up_proj', 'down_proj')
  if not config.qk_norm:
    block, *names = ('block_sparse_moe', 'w1', 'w3', 'w2')
  shapes = {'gate': (mlp, hidden), 'up': (mlp, hidden), 'down': (hidden, mlp)}
  router = _layer('router/kernel', (experts, hidden), f'{block}.gate', 'ffn_gate_inp')
  kernels = [
    _layer(f'experts_{part}/kernel', shape, f'{block}.experts.{{}}.{name}', f'ffn_{part}_exps')
    for (part, shape), name in zip(shapes.items(), names, strict=True)
  ]
  return [router, *(dataclasses.replace(leaf, experts=experts) for leaf in kernels)]


def set_leaf(tree: dict[str, Any], path: Path, value: Any) -> None:
  """Puts `value` at `path` of the nested dict `tree`, making the dicts on the way."""
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def get_leaf(tree: Any, path: Path) -> Any:
  """The value at `path` of the nested mapping `tree`; KeyError where there is none."""
  for key in path:
    tree = tree[key]
  return tree


def _top(path: str, shape: tuple[int, ...], hf_name: str, gguf_name: str) -> Leaf:
  return Leaf(
    path=tuple(path.split('/')),
    shape=shape,
    stacked=False,
    hf_name=f'{hf_name}.weight',
    gguf_name=f'{gguf_name}.weight',
  )


def _layer(
  path: str, shape: tuple[int, ...], hf_name: str, gguf_name: str, kind: str = 'weight'
) -> Leaf:
  return Leaf(
    path=('layers', *path.split('/')),
    shape=shape,
    stacked=True,
    hf_name=f'model.layers.{{}}.{hf_name}.{kind}',
    gguf_name=f'blk.{{}}.{gguf_name}.{kind}',
  )
