"""Experts against a plain loop over them in numpy, in value and gradient, alone and on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlax_stack.models.config import ModelConfig
from rlax_stack.models.experts import ExpertKernels, Routing, apply_mixture, block_size, mix, route
from rlax_stack.sharding import make_mesh

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 24, 8, 12, 6, 2
FORMS = ('blocks', 'ragged')


def _draw(seed=0, shape=(TOKENS, WIDTH), experts=EXPERTS):
  rng = np.random.default_rng(seed)
  kernels = ((experts, INNER, WIDTH), (experts, INNER, WIDTH), (experts, WIDTH, INNER))
  drawn = [rng.normal(size=size) for size in (shape, (experts, WIDTH), *kernels)]
  x, router, *parts = (jnp.asarray(value, jnp.float32) for value in drawn)
  return x, router, ExpertKernels(*(0.3 * part for part in parts))


def _expected(x, router, kernels, normalise=True):
  """Float64, one token and one expert after another."""
  x, router, *kernels = (np.asarray(value, np.float64) for value in (x, router, *kernels))
  gate, up, down = kernels
  out = np.zeros_like(x)
  for n, token in enumerate(x):
    p = np.exp(router @ token)
    p /= p.sum()
    chosen = np.argsort(-p)[:CHOSEN]
    total = p[chosen].sum() if normalise else 1.0
    for e in chosen:
      g = gate[e] @ token
      out[n] += p[e] / total * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ token)))
  return out


def _run(x, router, kernels, *, form='auto', normalise=True, **options):
  routing = route(x, router, experts_per_token=CHOSEN, normalise=normalise)
  return mix(x, routing, kernels, form=form, **options)


def _all_experts(x, router, kernels):
  """Every expert for every token, to differentiate."""
  p = jax.nn.softmax(x @ router.T, axis=-1)
  weights, chosen = jax.lax.top_k(p, CHOSEN)
  weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  g, u = (jnp.einsum('nd,efd->nef', x, kernel) for kernel in (kernels.gate, kernels.up))
  y = jnp.einsum('nef,edf->ned', jax.nn.silu(g) * u, kernels.down)
  return jnp.sum(jnp.take_along_axis(y, chosen[..., None], axis=1) * weights[..., None], axis=1)


@pytest.mark.parametrize('normalise', [True, False])
@pytest.mark.parametrize('form', FORMS)
def test_mixture_is_the_loop_over_experts(form, normalise):
  run = jax.jit(functools.partial(_run, form=form, normalise=normalise))
  for seed in range(3):
    x, router, kernels = _draw(seed)
    want = _expected(x, router, kernels, normalise)
    np.testing.assert_allclose(run(x, router, kernels), want, atol=2e-5)


@pytest.mark.parametrize('form', FORMS)
def test_gradients_are_those_of_all_experts(form):
  x, router, kernels = _draw()
  up = jnp.asarray(np.random.default_rng(9).normal(size=x.shape), jnp.float32)

  def pulled(function):
    return jax.jit(jax.grad(lambda *args: jnp.sum(up * function(*args)), argnums=(0, 1, 2)))

  got = pulled(functools.partial(_run, form=form))(x, router, kernels)
  want = pulled(_all_experts)(x, router, kernels)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), got, want)


@pytest.mark.parametrize('form', FORMS)
def test_no_expert_has_a_capacity_and_one_may_stay_idle(form):
  x, router, kernels = _draw()
  router = router.at[2].set(50 * x[0]).at[4].set(-router[2])  # logits far apart
  x = jnp.broadcast_to(x[:1], x.shape) * jnp.linspace(0.5, 1, TOKENS)[:, None]
  routing = route(x, router, experts_per_token=CHOSEN, normalise=True)
  assert set(np.asarray(routing.experts[:, 0]).tolist()) == {2}
  got = jax.jit(functools.partial(_run, form=form))(x, router, kernels)
  np.testing.assert_allclose(got, _expected(x, router, kernels), atol=2e-5)


def test_a_token_does_not_depend_on_its_companions():
  x, router, kernels = _draw()
  run = jax.jit(_run)
  whole = np.asarray(run(x, router, kernels))
  others = _draw(seed=5)[0].at[7].set(x[3])
  moved = np.asarray(run(others, router, kernels))
  np.testing.assert_array_equal(moved[7], whole[3])
  few = np.asarray(jax.jit(_run)(x[:8], router, kernels))
  np.testing.assert_array_equal(few, whole[:8])


@pytest.mark.parametrize('form', FORMS)
def test_layers_may_lie_one_after_another(form):
  x, router, kernels = _draw()
  other = _draw(seed=1)[2]
  stacked = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), other, kernels)
  run = jax.jit(functools.partial(_run, form=form))
  got = run(x, router, stacked, first=jnp.int32(EXPERTS))
  np.testing.assert_array_equal(got, run(x, router, kernels))


def test_route_takes_the_likeliest_first():
  logits = jnp.log(jnp.asarray([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05]], jnp.float32))
  for normalise, want in (
    (False, [[0.4, 0.3], [0.7, 0.15]]),
    (True, [[4 / 7, 3 / 7], [14 / 17, 3 / 17]]),
  ):
    # A router that is the unit matrix makes the hidden states the logits.
    got = route(logits, jnp.eye(4, dtype=jnp.float32), experts_per_token=2, normalise=normalise)
    assert isinstance(got, Routing)
    np.testing.assert_array_equal(got.experts, [[1, 3], [0, 2]])
    np.testing.assert_allclose(got.weights, want, rtol=1e-6)
    np.testing.assert_allclose(got.logits, logits, rtol=1e-6)


@pytest.mark.parametrize('normalise', [True, False])
def test_replayed_experts_get_the_weights_of_now(normalise):
  """Every other token is replayed, through experts that its router would not have taken."""
  x, router, _ = _draw()
  logits = np.asarray(x, np.float64) @ np.asarray(router, np.float64).T
  likeliest = np.argsort(-logits, axis=-1)
  replay = np.where(np.arange(TOKENS)[:, None] % 2, likeliest[:, -CHOSEN:], -1).astype(np.int16)
  up = jnp.asarray(np.random.default_rng(9).normal(size=(TOKENS, CHOSEN)), jnp.float32)

  def weights(router, normalise=normalise):
    options = {'experts_per_token': CHOSEN, 'normalise': normalise}
    routing = route(x, router, **options, replay=jnp.asarray(replay))
    return jnp.sum(up * routing.weights), routing

  gradient, routing = jax.grad(weights, has_aux=True)(router)
  chosen = np.where(replay >= 0, replay, likeliest[:, :CHOSEN])
  np.testing.assert_array_equal(routing.experts, chosen)

  def by_hand(router):
    p = np.exp(np.asarray(x, np.float64) @ router.T)
    p = np.take_along_axis(p / p.sum(-1, keepdims=True), chosen, axis=-1)
    return p / p.sum(-1, keepdims=True) if normalise else p

  exact = np.asarray(router, np.float64)
  np.testing.assert_allclose(routing.weights, by_hand(exact), atol=1e-5)
  step = np.random.default_rng(3).normal(size=exact.shape)
  ends = [np.sum(np.asarray(up) * by_hand(exact + sign * 1e-5 * step)) for sign in (1, -1)]
  slope = float(np.sum(np.asarray(gradient) * step))
  assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3) and abs(slope) > 1e-2


def test_bfloat16_keeps_its_dtype_and_routes_in_float32():
  x, router, kernels = _draw()
  half = x.astype(jnp.bfloat16)
  routing = route(half, router, experts_per_token=CHOSEN, normalise=True)
  assert routing.logits.dtype == routing.weights.dtype == jnp.float32
  got = mix(half, routing, kernels)
  assert got.dtype == jnp.bfloat16
  want = _expected(half.astype(jnp.float32), router.astype(jnp.bfloat16), kernels)
  np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.06)


@pytest.mark.parametrize(
  'sizes',
  [{'data': 2, 'fsdp': 2, 'tensor': 2}, {'expert': 3}, {'data': 2, 'tensor': 2, 'expert': 2}],
)
def test_a_mesh_changes_no_value_and_no_gradient(sizes):
  x, router, kernels = _draw(shape=(24, 2, WIDTH))
  mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])

  def loss(*args, mesh=None):
    return jnp.sum(jnp.sin(_run(*args, mesh=mesh)))

  grad = jax.value_and_grad(loss, argnums=(0, 1, 2))
  got = jax.jit(functools.partial(grad, mesh=mesh))(x, router, kernels)
  want = jax.jit(grad)(x, router, kernels)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), got, want)


def test_an_unknown_form_is_refused():
  x, router, kernels = _draw()
  with pytest.raises(ValueError, match="form='dense'"):
    _run(x, router, kernels, form='dense')


def test_blocks_are_near_the_choices_of_an_expert():
  sizes = [block_size(choices, 8) for choices in (1, 64, 72, 500, 10**6)]
  assert sizes == [8, 8, 16, 64, 128]


def test_a_layer_routes_and_mixes_by_its_config():
  config = ModelConfig(
    vocab_size=8,
    hidden_size=WIDTH,
    intermediate_size=INNER,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    num_experts=EXPERTS,
    experts_per_token=CHOSEN,
    moe_intermediate_size=INNER,
    norm_topk_prob=False,
  )
  x, router, kernels = _draw()
  mixed, routing = apply_mixture(config, x, router, kernels)
  np.testing.assert_allclose(mixed, _expected(x, router, kernels, normalise=False), atol=1e-4)
  assert routing.experts.shape == (TOKENS, CHOSEN)
