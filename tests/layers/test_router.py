"""Routing against the formulas in float64 and against transformers' own routers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import CheckpointError
from specjax.layers.router import RouterConfig, route

RNG = np.random.default_rng(0)
N, E, K, H = 40, 12, 3, 16
LOGITS = RNG.normal(size=(N, E)) * 2
BIAS = RNG.normal(size=E) * 0.3
SCALE = RNG.uniform(0.5, 2, size=E)


def reference(logits, config, bias=None, scale=None):
    """One token after the other, one expert after the other, in float64."""
    ids, weights = [], []
    for row in np.asarray(logits, np.float64):
        if config.score == "softmax":
            scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        else:
            scores = 1 / (1 + np.exp(-row))
        choice = scores + (0 if bias is None else bias)
        size = config.experts // config.groups
        groups = [choice[g * size : (g + 1) * size] for g in range(config.groups)]
        by_score = sorted(range(config.groups), key=lambda g: -np.sort(groups[g])[-2:].sum())
        open_to = [e for e in range(config.experts) if e // size in by_score[: config.top_groups]]
        chosen = sorted(open_to, key=lambda e: -choice[e])[: config.top_k]
        weight = scores[chosen]
        if config.normalise:
            weight = weight / weight.sum()
        weight = weight * config.scaling
        ids.append(chosen)
        weights.append(weight if scale is None else weight * scale[chosen])
    return np.asarray(ids), np.asarray(weights)


CASES = {
    "qwen3_moe": (RouterConfig(E, K, "softmax"), False, False),
    "qwen3_moe_plain": (RouterConfig(E, K, "softmax", normalise=False), False, False),
    "gemma4": (RouterConfig(E, K, "softmax"), False, True),
    "deepseek": (RouterConfig(E, K, "sigmoid", True, 2.5, groups=4, top_groups=2), True, False),
    "deepseek_plain": (RouterConfig(E, K, "sigmoid", False, 2.5, groups=3), True, False),
    "kimi": (RouterConfig(E, K, "sigmoid", scaling=2.827), True, False),
    "minimax": (RouterConfig(E, K, "sigmoid"), True, False),
    "one": (RouterConfig(E, 1, "softmax", normalise=False), False, False),
    "all": (RouterConfig(E, E, "sigmoid"), True, False),
}


@pytest.mark.parametrize("name", CASES)
def test_formulas(name):
    config, biased, scaled = CASES[name]
    bias, scale = BIAS if biased else None, SCALE if scaled else None
    to = [None if t is None else jnp.asarray(t, jnp.float32) for t in (bias, scale)]
    ids, weights = jax.jit(route, static_argnums=1)(jnp.asarray(LOGITS, jnp.float32), config, *to)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    want_ids, want = reference(LOGITS, config, bias, scale)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=2e-5)


def test_bias_decides_and_does_not_weigh():
    config = RouterConfig(E, K, "sigmoid", normalise=False)
    bias = jnp.zeros(E).at[7].set(10.0)
    ids, weights = route(jnp.asarray(LOGITS, jnp.float32), config, bias)
    np.testing.assert_array_equal(ids[:, 0], 7)
    np.testing.assert_allclose(weights[:, 0], 1 / (1 + np.exp(-LOGITS[:, 7])), rtol=1e-5)


def test_ties_go_to_the_lowest_id():
    flat = jnp.zeros((2, E))
    ids, weights = route(flat, RouterConfig(E, K, "softmax"))
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)
    np.testing.assert_allclose(weights, 1 / K, rtol=1e-6)
    grouped = RouterConfig(E, K, "sigmoid", groups=4, top_groups=2)
    ids, _ = route(flat.at[1, 9:].set(1.0), grouped)  # the last group wins in row 1
    np.testing.assert_array_equal(ids, [[0, 1, 2], [9, 10, 11]])


def test_a_group_that_lost_gives_no_expert_though_it_has_the_best():
    logits = jnp.full((1, 6), -3.0).at[0, 0].set(2.0).at[0, 2:4].set(1.9)
    ids, _ = route(logits, RouterConfig(6, 2, "sigmoid", groups=3, top_groups=1))
    np.testing.assert_array_equal(ids, [[2, 3]])
    ids, _ = route(logits, RouterConfig(6, 2, "sigmoid"))
    np.testing.assert_array_equal(ids, [[0, 2]])


def test_float32_whatever_comes_in():
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    config = RouterConfig(E, K, "softmax")
    for got, want in zip(route(half, config), route(half.astype(jnp.float32), config), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_scores_that_underflow_give_no_nan():
    _, weights = route(jnp.full((1, E), -200.0), RouterConfig(E, K, "sigmoid"))
    np.testing.assert_array_equal(weights, 0)


def test_gradient_of_the_weights_is_that_of_the_formula():
    config = RouterConfig(E, K, "sigmoid", True, 2.5, groups=4, top_groups=2)
    logits, bias = jnp.asarray(LOGITS[:3], jnp.float32), jnp.asarray(BIAS, jnp.float32)
    pull = RNG.normal(size=(3, K))
    got = jax.grad(lambda z: (route(z, config, bias)[1] * pull).sum())(logits)
    for n, e in ((0, int(route(logits, config, bias)[0][0, 1])), (1, 5), (2, 0)):
        step = np.zeros_like(LOGITS[:3])
        step[n, e] = 1e-5
        high, low = (reference(LOGITS[:3] + s, config, BIAS)[1] for s in (step, -step))
        np.testing.assert_allclose(got[n, e], ((high - low) * pull).sum() / 2e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"score": "tanh"}, "score 'tanh'; have softmax, sigmoid"),
        ({"top_k": 13}, "top_k 13 of 12"),
        ({"top_k": 0}, "top_k 0"),
        ({"groups": 5}, "12 experts do not divide into 5 groups"),
        ({"groups": 0}, "into 0 groups"),
        ({"groups": 4, "top_groups": 5}, "5 of 4 groups"),
        ({"groups": 4, "top_groups": 1, "top_k": 4}, "top_k 4 of 3"),
        ({"groups": 12, "top_groups": 4}, "groups of 1 expert"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        RouterConfig(**{"experts": E, "top_k": K, "score": "sigmoid", **fields})
    assert "\n" not in str(caught.value)


def same_as_torch(got, ids, weights):
    """Compare as sets per token: torch leaves the order of its top-k open."""
    ids, weights = ids.numpy(), weights.numpy()
    order, ours = np.argsort(ids, -1), np.argsort(got[0], -1)
    take = np.take_along_axis
    np.testing.assert_array_equal(take(np.asarray(got[0]), ours, -1), take(ids, order, -1))
    np.testing.assert_allclose(
        take(np.asarray(got[1]), ours, -1), take(weights, order, -1), rtol=2e-5, atol=1e-7
    )


@pytest.fixture(scope="module")
def drawn():
    """(torch, inputs, router matrix, bias): the same numbers for torch and for us."""
    torch = pytest.importorskip("torch")
    x, gate = (RNG.normal(size=s).astype(np.float32) for s in ((N, H), (E, H)))
    return torch, x, gate, BIAS.astype(np.float32)


def run(module, drawn, *more):
    torch, x, gate, _ = drawn
    with torch.no_grad():
        module.weight.copy_(torch.tensor(gate))
        _, weights, ids = module(torch.tensor(x), *more)
    return ids, weights


@pytest.mark.torch
@pytest.mark.parametrize("normalise", [False, True])
def test_qwen3_moe_router_of_transformers(drawn, normalise):
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    module = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(
            num_experts=E, num_experts_per_tok=K, norm_topk_prob=normalise, hidden_size=H
        )
    )
    got = route(jnp.asarray(drawn[1] @ drawn[2].T), RouterConfig(E, K, "softmax", normalise))
    same_as_torch(got, *run(module, drawn))


@pytest.mark.torch
@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (3, 1), (1, 1)])
def test_deepseek_v3_router_of_transformers(drawn, groups, top_groups):
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    module = DeepseekV3TopkRouter(
        DeepseekV3Config(
            n_routed_experts=E, num_experts_per_tok=K, hidden_size=H, n_group=groups,
            topk_group=top_groups, norm_topk_prob=True, routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    module.e_score_correction_bias.copy_(drawn[0].tensor(drawn[3]))
    config = RouterConfig(E, K, "sigmoid", True, 2.5, groups, top_groups)
    got = route(jnp.asarray(drawn[1] @ drawn[2].T), config, jnp.asarray(drawn[3]))
    same_as_torch(got, *run(module, drawn))


@pytest.mark.torch
def test_minimax_m2_router_of_transformers(drawn):
    from transformers.models.minimax_m2 import MiniMaxM2Config
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter

    module = MiniMaxM2TopKRouter(
        MiniMaxM2Config(num_local_experts=E, num_experts_per_tok=K, hidden_size=H)
    )
    logits, bias = jnp.asarray(drawn[1] @ drawn[2].T), jnp.asarray(drawn[3])
    got = route(logits, RouterConfig(E, K, "sigmoid"), bias)
    same_as_torch(got, *run(module, drawn, drawn[0].tensor(drawn[3])))


@pytest.mark.torch
def test_gemma4_router_of_transformers(drawn):
    from transformers.models.gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    torch, x, gate, _ = drawn
    module = Gemma4TextRouter(
        Gemma4TextConfig(hidden_size=H, num_experts=E, top_k_experts=K, enable_moe_block=True)
    )
    with torch.no_grad():
        module.proj.weight.copy_(torch.tensor(gate))
        module.per_expert_scale.copy_(torch.tensor(SCALE))
        _, weights, ids = module(torch.tensor(x))
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * H**-0.5
    got = route(
        jnp.asarray(normed @ gate.T), RouterConfig(E, K, "softmax"), expert_scale=jnp.asarray(SCALE)
    )
    same_as_torch(got, ids, weights)
