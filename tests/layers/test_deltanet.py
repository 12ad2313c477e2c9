"""The gated delta-net: chunks, commits and pads are the recurrence token by token."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import CheckpointError
from specjax.core.params import leaves_with_names, map_specs
from specjax.layers.deltanet import (
    DeltaNetConfig,
    DeltaNetWeights,
    delta_net,
    delta_rule,
    unit_lower_inverse,
)
from specjax.layers.documents import Documents

CONFIG = DeltaNetConfig(
    hidden=12, key_heads=2, value_heads=4, key_dim=5, value_dim=6, conv_kernel=4, eps=1e-6
)
KIND = CONFIG.cache
B = 2


def random_weights(seed=0, config=CONFIG):
    rng = np.random.default_rng(seed)

    def draw(spec):
        scale = 1.0 if len(spec.shape) < 2 or "conv1d" in spec.hf else spec.shape[-1] ** -0.5
        return jnp.asarray(rng.normal(size=spec.shape) * scale, jnp.float32)

    return map_specs(draw, DeltaNetWeights.abstract(config, "model.layers.0."))


WEIGHTS = random_weights()


@functools.partial(jax.jit, static_argnames="chunk")
def forward(x, valid, entry, chunk=64, weights=WEIGHTS):
    return delta_net(weights, CONFIG, x, valid, entry, chunk)


@jax.jit
def commit(entry, new, n):
    return KIND.write(entry, jnp.zeros_like(n), new, n)


def inputs(seed, length, batch=B):
    x = np.random.default_rng(seed).normal(size=(batch, length, CONFIG.hidden))
    return jnp.asarray(x, jnp.float32)


def all_of(x):
    return jnp.full(x.shape[0], x.shape[1])


def empty(batch=B):
    return KIND.empty(batch, 0, "float32")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def recurrence(x, weights=WEIGHTS, config=CONFIG):
    """One row in float64, token by token: (outputs, states, inputs of the convolution)."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    nk, nv, dk, dv = config.key_heads, config.value_heads, config.key_dim, config.value_dim
    past = [np.zeros(KIND.channels)] * (config.conv_kernel - 1)
    state = np.zeros((nv, dk, dv))
    outputs, states = [], []
    for token in np.asarray(x, np.float64):
        past.append(w.qkv @ token)
        mixed = sum(
            w.conv[:, 0, j] * past[j - config.conv_kernel] for j in range(len(w.conv[0, 0]))
        )
        mixed = mixed * sigmoid(mixed)
        q, k = mixed[: 2 * nk * dk].reshape(2, nk, dk)
        v = mixed[2 * nk * dk :].reshape(nv, dv)
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
        beta = sigmoid(w.b @ token)
        decay = np.exp(-np.exp(w.a_log) * np.log1p(np.exp(w.a @ token + w.dt_bias)))
        q, k = (np.repeat(y, nv // nk, axis=0) for y in (q * dk**-0.5, k))
        state = decay[:, None, None] * state
        w_t = beta[:, None] * (v - np.einsum("mde,md->me", state, k))
        state = state + k[:, :, None] * w_t[:, None, :]
        o = np.einsum("mde,md->me", state, q)
        normed = w.norm * o / np.sqrt((o * o).mean(-1, keepdims=True) + config.eps)
        z = w.z @ token
        outputs.append(w.out @ (normed.ravel() * z * sigmoid(z)))
        states.append(state)
    return np.array(outputs), states, past


def check(cache, rows, atol=1e-5):
    """The cache holds just these tokens: state and tail equal a fresh run of each row."""
    for b, row in enumerate(rows):
        _, states, past = recurrence(row)
        want = states[-1] if states else np.zeros(cache.state.shape[1:])
        np.testing.assert_allclose(cache.state[b], want, atol=atol)
        np.testing.assert_allclose(
            cache.tail[b], past[len(past) - KIND.conv_kernel + 1 :], atol=atol
        )


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (5, 64), (23, 5), (12, 4), (200, 64)])
def test_one_call_is_the_recurrence(length, chunk):
    x = inputs(length, length)
    y, new = forward(x, all_of(x), empty(), chunk=chunk)
    for b in range(B):
        # The norm of the outputs magnifies rounding where a head says next to nothing.
        np.testing.assert_allclose(y[b], recurrence(x[b])[0], atol=3e-5)
    check(commit(empty(), new, all_of(x)), x)


def test_without_a_cache_a_text_begins():
    x = inputs(1, 9)
    for got, want in zip(
        jax.tree.leaves(forward(x, all_of(x), None)),
        jax.tree.leaves(forward(x, all_of(x), empty())),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_every_split_into_calls_is_one_call():
    x = inputs(2, 5)
    want = np.stack([recurrence(row)[0] for row in x])
    for cuts in itertools.product((False, True), repeat=4):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), 5]
        cache, got = empty(), []
        for start, end in itertools.pairwise(edges):
            part = x[:, start:end]
            y, new = forward(part, all_of(part), cache)
            cache = commit(cache, new, all_of(part))
            got.append(y)
        np.testing.assert_allclose(np.concatenate(got, 1), want, atol=1e-5, err_msg=str(edges))
        check(cache, x)


@pytest.mark.parametrize("chunk", [64, 2])
def test_rejected_drafts_leave_no_trace(chunk):
    """F52: after rounds that each keep some of their tokens, the state is a fresh prefill's."""
    text, rng = np.asarray(inputs(3, 60)), np.random.default_rng(3)
    want = [recurrence(row)[0] for row in text]
    cache, lengths = empty(), np.zeros(B, int)
    for turn in range(10):
        drafts = np.asarray(inputs(100 + turn, 5)) * 3
        n = rng.integers(0, 6, size=B)
        for b in range(B):
            drafts[b, : n[b]] = text[b, lengths[b] : lengths[b] + n[b]]
        y, new = forward(jnp.asarray(drafts), jnp.full(B, 5), cache, chunk=chunk)
        cache = commit(cache, new, jnp.asarray(n))
        for b in range(B):
            expected = want[b][lengths[b] : lengths[b] + n[b]]
            np.testing.assert_allclose(y[b, : n[b]], expected, atol=1e-5)
        lengths += n
        check(cache, [text[b, : lengths[b]] for b in range(B)])
    assert (lengths > 10).all() and lengths[0] != lengths[1]


@pytest.mark.parametrize("chunk", [64, 3])
def test_ragged_rows_and_whatever_stands_at_pads(chunk):
    x, valid = inputs(4, 8, batch=3), jnp.asarray([8, 0, 3])
    pads = jnp.arange(8)[None, :, None] >= valid[:, None, None]
    start = empty(3)
    results = []
    for garbage in (0.0, 1e6, jnp.nan):
        y, new = forward(jnp.where(pads, garbage, x), valid, start, chunk=chunk)
        results.append((y, new, commit(start, new, valid)))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])
    y, new, cache = results[0]
    assert not np.asarray(y)[np.broadcast_to(pads, y.shape)].any()
    for b in (0, 2):
        np.testing.assert_allclose(y[b, : valid[b]], recurrence(x[b, : valid[b]])[0], atol=1e-5)
    check(cache, [x[b, : valid[b]] for b in range(3)])
    # A pad is a token that does nothing, even where it is committed.
    past_the_end = commit(start, new, jnp.full(3, 8))
    np.testing.assert_allclose(past_the_end.state, cache.state, atol=1e-6)


@pytest.mark.parametrize(("a_log", "bias"), [(8.0, 3.0), (-30.0, 0.0), (0.0, -80.0), (3.0, 80.0)])
def test_states_that_forget_all_or_nothing(a_log, bias):
    weights = WEIGHTS.replace(
        a_log=jnp.full_like(WEIGHTS.a_log, a_log), dt_bias=jnp.full_like(WEIGHTS.dt_bias, bias)
    )
    x = inputs(5, 90)
    y, new = forward(x, all_of(x), empty(), weights=weights)
    cache = commit(empty(), new, all_of(x))
    for b in range(B):
        outputs, states, _ = recurrence(x[b], weights)
        np.testing.assert_allclose(y[b], outputs, atol=2e-5)
        np.testing.assert_allclose(cache.state[b], states[-1], atol=2e-5)


def rule_in_float64(q, k, v, log_decay, beta, state):
    q, k, v, log_decay, beta, state = (
        np.array(x, np.float64) for x in (q, k, v, log_decay, beta, state)
    )
    o, w = np.zeros_like(v), np.zeros_like(v)
    for b, m in np.ndindex(v.shape[:2]):
        n = m // (v.shape[1] // k.shape[1])
        for t in range(v.shape[2]):
            state[b, m] *= np.exp(log_decay[b, m, t])
            w[b, m, t] = beta[b, m, t] * (v[b, m, t] - state[b, m].T @ k[b, n, t])
            state[b, m] += np.outer(k[b, n, t], w[b, m, t])
            o[b, m, t] = state[b, m].T @ q[b, n, t]
    return o, w


@pytest.mark.parametrize("case", ["forgets now and then", "one key over and over"])
def test_the_rule_where_its_sums_are_hard(case):
    rng = np.random.default_rng(6)
    q, k = rng.normal(size=(2, 1, 2, 100, 5))
    v, state = rng.normal(size=(1, 4, 100, 6)), rng.normal(size=(1, 4, 5, 6))
    log_decay, beta = np.full((1, 4, 100), -1e-3), np.full((1, 4, 100), 0.999)
    if case == "forgets now and then":
        # Sums over a chunk reach 1e5: what is between two tokens must not come from these.
        log_decay = np.where(rng.random(log_decay.shape) < 0.2, -1e4, log_decay)
    else:
        k[:] = k[:, :, :1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    args = [jnp.asarray(a, jnp.float32) for a in (q, k, v, log_decay, beta, state)]
    for got, want in zip(jax.jit(delta_rule)(*args), rule_in_float64(*args), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("size", [1, 3, 16, 17, 40, 64])
def test_unit_lower_inverse(size):
    rng = np.random.default_rng(size)
    k = rng.normal(size=(3, size, 4))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    k[0] = k[0, 0]  # all alike: the lower triangle is full of ones
    lower = np.tril(k @ k.swapaxes(1, 2), -1)
    got = unit_lower_inverse(jnp.asarray(lower, jnp.float32))
    np.testing.assert_allclose(got, np.linalg.inv(np.eye(size) + lower), atol=2e-6)


def test_gradient_is_the_slope_of_the_recurrence():
    x, rng = inputs(7, 9, batch=1), np.random.default_rng(7)
    into = rng.normal(size=(9, CONFIG.hidden))

    @jax.jit
    def gradients(x, weights):
        def total(x, weights):
            y, _ = delta_net(weights, CONFIG, x, jnp.asarray([9]), None, chunk=4)
            return jnp.sum(y[0] * into)

        return jax.grad(total, (0, 1))(x, weights)

    got = gradients(x, WEIGHTS)
    steps = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), (x, WEIGHTS))

    def moved(h):
        x_at, weights = jax.tree.map(
            lambda leaf, step: np.asarray(leaf, np.float64) + h * step, (x, WEIGHTS), steps
        )
        return (recurrence(x_at[0], weights)[0] * into).sum()

    slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
    along = sum(jnp.vdot(*pair) for pair in zip(*map(jax.tree.leaves, (got, steps)), strict=True))
    np.testing.assert_allclose(along, slope, rtol=1e-4)


@pytest.mark.parametrize("chunk", [4, 5, 64])
def test_texts_of_a_packed_row_are_apart(chunk):
    """Each text is the recurrence from an empty state, wherever chunks end."""
    sizes, x = (2, 9, 1, 7), inputs(3, 21, 1)
    index = np.full((1, 21), -1)
    positions = np.zeros_like(index)
    index[0, :19] = np.repeat(np.arange(4), sizes)
    positions[0, :19] = np.concatenate([np.arange(n) for n in sizes])
    documents = Documents(jnp.asarray(index), jnp.asarray(positions))
    y, new = delta_net(WEIGHTS, CONFIG, x, jnp.asarray([19]), None, chunk, documents=documents)
    ends = np.cumsum(sizes)
    for start, end in zip(ends - sizes, ends, strict=True):
        want, states, _ = recurrence(x[0, start:end])
        np.testing.assert_allclose(y[0, start:end], want, atol=1e-5)
        # What commit would keep of the row so far is the state of this text alone.
        kept = KIND.write(empty(1), jnp.zeros(1, int), new, jnp.asarray([end]))
        np.testing.assert_allclose(kept.state[0], states[-1], atol=1e-5)
    assert not np.asarray(y[0, 19:]).any()


def test_gradient_is_finite_at_pads_and_with_a_text_of_nothing():
    x, valid = inputs(8, 6), jnp.asarray([4, 0])

    def total(x, weights):
        y, new = delta_net(weights, CONFIG, x, valid, None, chunk=4)
        cache = KIND.write(empty(), jnp.zeros_like(valid), new, valid)
        return y.sum() + jnp.square(cache.state).sum()

    in_x, in_weights = jax.jit(jax.grad(total, (0, 1)))(x, WEIGHTS)
    for leaf in jax.tree.leaves((in_x, in_weights)):
        assert np.isfinite(leaf).all() and np.any(leaf)
    assert not np.asarray(in_x[0, 4:]).any() and not np.asarray(in_x[1]).any()


def test_bfloat16_keeps_the_recurrence_in_float32():
    fixed = ("norm", "a_log", "dt_bias")
    weights = WEIGHTS.replace(
        **{
            name: getattr(WEIGHTS, name).astype(jnp.bfloat16)
            for name in WEIGHTS.__dataclass_fields__
            if name not in fixed
        }
    )
    x, cache = inputs(9, 12).astype(jnp.bfloat16), KIND.empty(B, 0, "bfloat16")
    y, new = forward(x, all_of(x), cache, weights=weights)
    whole = commit(cache, new, all_of(x))
    assert y.dtype == whole.tail.dtype == jnp.bfloat16 and whole.state.dtype == jnp.float32
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    for b in range(B):
        want, states, _ = recurrence(x[b].astype(jnp.float32), rounded)
        np.testing.assert_allclose(y[b].astype(jnp.float32), want, atol=0.05)
        np.testing.assert_allclose(whole.state[b], states[-1], atol=0.02)
    for start in range(0, 12, 3):  # rounding does not depend on the chunking
        part = x[:, start : start + 3]
        _, new = forward(part, all_of(part), cache, weights=weights)
        cache = commit(cache, new, all_of(part))
    np.testing.assert_allclose(cache.state, whole.state, atol=1e-5)
    np.testing.assert_array_equal(cache.tail.astype(jnp.float32), whole.tail.astype(jnp.float32))


def test_a_bfloat16_cache_of_a_float32_model_does_not_depend_on_the_chunking():
    x, cache = inputs(10, 12), KIND.empty(B, 0, "bfloat16")
    _, new = forward(x, all_of(x), cache)
    whole = commit(cache, new, all_of(x))
    for start in range(0, 12, 3):
        part = x[:, start : start + 3]
        _, new = forward(part, all_of(part), cache)
        cache = commit(cache, new, all_of(part))
    np.testing.assert_allclose(cache.state, whole.state, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value_heads": 3}, "linear_num_value_heads 3"),
        ({"conv_kernel": 1}, "linear_conv_kernel_dim"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, words):
    sizes = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    with pytest.raises(CheckpointError, match=words):
        DeltaNetConfig(**{**sizes, **changes})


def test_what_drives_the_state_stays_float32():
    specs = dict(leaves_with_names(DeltaNetWeights.abstract(CONFIG, "p.")))
    assert {name for name, spec in specs.items() if spec.dtype} == {"norm", "a_log", "dt_bias"}


@pytest.mark.torch
@pytest.mark.parametrize("value_heads", [2, 4])
def test_transformers_agrees_on_names_and_numbers(value_heads):
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(0)
    module = Qwen3_5GatedDeltaNet(
        Qwen3_5TextConfig(
            hidden_size=12,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=value_heads,
            linear_key_head_dim=5,
            linear_value_head_dim=6,
            linear_conv_kernel_dim=4,
            rms_norm_eps=1e-6,
        ),
        layer_idx=0,
    ).eval()
    published = {f"p.linear_attn.{k}": v.detach().numpy() for k, v in module.named_parameters()}
    config = DeltaNetConfig(12, 2, value_heads, 5, 6, 4, 1e-6)
    specs = DeltaNetWeights.abstract(config, "p.")
    assert {s.hf: s.shape for _, s in leaves_with_names(specs)} == {
        name: array.shape for name, array in published.items()
    }
    weights = map_specs(lambda spec: jnp.asarray(published[spec.hf]), specs)
    x = inputs(11, 21)
    run = jax.jit(lambda weights, x: delta_net(weights, config, x, all_of(x), None, chunk=8)[0])
    got = run(weights, x)
    with torch.no_grad():
        want = module(torch.tensor(np.asarray(x))).numpy()
    assert np.abs(want).max() > 0.05
    np.testing.assert_allclose(got, want, atol=1e-5)
