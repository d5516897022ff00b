"""Exported adapters as PEFT loads them: the same logits as ours, through its own formulas.

Runs in an environment of its own (`make parity`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models.adapter import AdapterSettings, attach, init_adapter
from rlax_stack.models.decoder import hidden_states, lm_head
from rlax_stack.models.hf import load_hf
from rlax_stack.models.peft import save_peft
from rlax_stack.pallas_kernels.tree_attention import AttentionShape, prepare_tree_attention

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
peft = pytest.importorskip('peft')

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings('ignore')]

_TOKENS = np.arange(40, dtype=np.int32).reshape(2, 20) * 7 % 96


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  """A tiny Qwen3 in a folder, its config and our parameters."""
  folder = tmp_path_factory.mktemp('base')
  torch.manual_seed(0)
  config = transformers.Qwen3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.2,
  )
  transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
  return folder, *load_hf(folder)


def _trained(config, settings, params):
  """An adapter that is no fresh one: every number of it moved."""
  rng = np.random.default_rng(0)
  fresh = init_adapter(config, settings, params)
  return jax.tree.map(
    lambda x: np.asarray(x) + 0.05 * rng.standard_normal(x.shape).astype(np.float32), fresh
  )


def _logits(config, params):
  positions = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), (2, 20))
  attend = prepare_tree_attention(
    positions,
    jnp.full((2, 20), 20, jnp.int32),
    shape=AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, jnp.float32),
  )
  hidden = hidden_states(params, config, jnp.asarray(_TOKENS), positions, attend)
  return np.asarray(hidden @ lm_head(params, config).T)


@pytest.mark.parametrize('kind', ['lora', 'rslora', 'dora'])
def test_peft_computes_what_we_do(kind, base, tmp_path):
  folder, config, params = base
  targets = ('q_proj/kernel', 'layers/down_proj/kernel', '*/o_proj/*')
  settings = AdapterSettings(kind=kind, rank=4, alpha=6.0, targets=tuple(f'*{t}' for t in targets))
  adapter = _trained(config, settings, params)
  save_peft(tmp_path / 'adapter', config, adapter, settings, base_model=str(folder))
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  plain = model(torch.from_numpy(_TOKENS.astype(np.int64))).logits.detach().numpy()
  model = peft.PeftModel.from_pretrained(model, tmp_path / 'adapter').eval()
  with torch.no_grad():
    want = model(torch.from_numpy(_TOKENS.astype(np.int64))).logits.numpy()
  got = _logits(config, attach(adapter, params, settings))
  assert np.abs(want - plain).max() > 0.1
  np.testing.assert_allclose(got, want, atol=2e-4, rtol=1e-4)
