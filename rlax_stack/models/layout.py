"""The parameter tree of a config, leaf by leaf, and the names its leaves have in model files.

One table for every importer and exporter: a path in the tree, the shape of one layer's slice, and
the name of that slice in Hugging Face and GGUF files.
"""

import dataclasses
from typing import Any

from rlax_stack.models.config import ModelConfig

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """One leaf of the tree. Where `stacked`, `shape` is of one layer, `{}` in names its number."""

  path: Path
  shape: tuple[int, ...]
  stacked: bool
  hf_name: str
  gguf_name: str

  def full_shape(self, config: ModelConfig) -> tuple[int, ...]:
    """Shape in the tree: with the layer axis in front where stacked."""
    return (config.num_layers, *self.shape) if self.stacked else self.shape


def leaves(config: ModelConfig) -> list[Leaf]:
  """Every leaf of the parameters of `config`, embedding first."""
  hidden, mlp = config.hidden_size, config.intermediate_size
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
    _layer('gate_proj/kernel', (mlp, hidden), 'mlp.gate_proj', 'ffn_gate'),
    _layer('up_proj/kernel', (mlp, hidden), 'mlp.up_proj', 'ffn_up'),
    _layer('down_proj/kernel', (hidden, mlp), 'mlp.down_proj', 'ffn_down'),
    _top('final_norm/scale', (hidden,), 'model.norm', 'output_norm'),
  ]
  if not config.tie_embeddings:
    result.append(_top('lm_head/kernel', (config.vocab_size, hidden), 'lm_head', 'output'))
  return result


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
