"""Gemma 4 MTP as a draft head: the reference's numbers, and the state after rejected drafts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import heads
from specjax.core.errors import PairingError
from specjax.decode import Engine, EngineConfig, Request
from specjax.decode import round as rounds
from specjax.heads.base import Borrowed, DraftContext, Observation
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead, Gemma4MtpState
from specjax.layers.cache.full import FullCache
from specjax.layers.cache.window import WindowKind
from specjax.layers.sampling import Sampling
from specjax.verify import verify
from tests.decode.adversary import CONFIGS, VOCAB, WINDOW, tiny
from tests.heads.gemma4_mtp import cases

SIX_LAYERS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
}


@pytest.mark.parametrize(
    ("prefix", "position", "extra"),
    [("draft", "draft_window", 1), ("draft_window",) * 2 + (0,), ("draft_serving",) * 2 + (0,)],
)
def test_drafts_agree_with_the_reference(prefix: str, position: Any, extra: int) -> None:
    head, params = heads.load(cases.FIXTURE, cases.info())
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, position=position))
    x = cases.read(cases.FIXTURE / "expected.safetensors")
    # The embedding of what was fed, from the stored inputs: the target is not needed.
    table = np.full((144, 32), np.nan, np.float32)
    for name in ("draft", "draft_window", "draft_serving"):
        fed = np.concatenate([x["draft.next_token"], x[f"{name}.tokens"][:, :-1]], axis=1)
        table[fed] = x[f"{name}.inputs_embeds"][..., :32] / np.float32(32**0.5)
    borrowed = Borrowed(jnp.asarray(table), jnp.full((144, 32), jnp.nan))  # the output: never used
    lengths = jnp.asarray(x["draft.prefix_len"])
    rows, keys = len(lengths), []
    for kind, layer in zip(("sliding", "full"), head.keys, strict=True):
        k, v = (
            jnp.broadcast_to(part[:1], (rows, *part.shape[1:]))
            for part in (x[f"shared_kv.{kind}_attention.{n}"] for n in ("key", "value"))
        )
        cache = layer.cache
        if isinstance(cache, WindowKind):
            cache = dataclasses.replace(cache, window=cache.window + extra)
        empty = cache.empty(rows, k.shape[2], "float32")
        keys.append(cache.write(empty, jnp.zeros_like(lengths), (k, v), lengths))
    context = DraftContext(
        anchor=jnp.asarray(x["draft.next_token"][:, 0]),
        position=lengths,
        tokens=jnp.zeros((rows, 1), jnp.int32),
        lengths=lengths + 1,
        sampling=Sampling.of(rows),
        keys=tuple(keys),
    )
    state = Gemma4MtpState(jnp.asarray(x["target.final_hidden"][0])[lengths - 1])
    draft = cases.jit(lambda p, s, c: head.draft(p, borrowed, s, c, 4, extra))
    proposal, steps, logits = draft(params, state, context)
    np.testing.assert_array_equal(proposal.tokens, x[f"{prefix}.tokens"])
    projected = jnp.concatenate([s.state for s in steps], axis=1)
    np.testing.assert_allclose(projected, x[f"{prefix}.projected_hidden"], atol=1e-4)
    inputs = jnp.concatenate([s.inputs for s in steps], axis=1)  # F13: embeddings are scaled
    np.testing.assert_allclose(inputs, x[f"{prefix}.inputs_embeds"], atol=1e-4)
    got, wanted = np.stack(logits, axis=1), x[f"{prefix}.logits"]
    scored = np.isfinite(got)
    assert (scored.sum(-1) == 3 * 144 // 12).all()
    np.testing.assert_allclose(got[scored], wanted[scored], atol=1e-4)
    least = np.where(scored, wanted, np.inf).min(-1, keepdims=True) - 1  # the reference's filler
    np.testing.assert_allclose(np.where(scored, 0, wanted), np.where(scored, 0, least), atol=1e-4)
    if prefix == "draft":
        streams = jnp.stack(steps[0].streams, axis=1)
        np.testing.assert_allclose(streams, x["draft.hidden_states"], atol=1e-4)


def reference(head: Gemma4MtpHead, params: Any, borrowed: Borrowed, x: dict[str, Any]) -> Any:
    """Compute a greedy chain of one row in float64: (tokens, logits), keys as plain arrays."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(y: np.ndarray, w: np.ndarray | None) -> np.ndarray:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + head.eps)
        return y if w is None else y * w

    token, state, tokens, seen = x["anchor"], x["state"], [], []
    for _ in range(3):
        e = np.asarray(borrowed.embedding, np.float64)[token] * head.embed_scale
        y = p.pre @ np.concatenate([e, state])
        for layer, source, w in zip(head.layers, head.sources, p.layers, strict=True):
            a, (k, v) = layer.attention, x["keys"][source]
            if a.window is not None:
                k, v = k[:, -a.window :], v[:, -a.window :]
            q = (w.attention.q @ norm(y, w.input_norm)).reshape(a.heads, a.head_dim)
            q = norm(q, w.attention.q_norm)
            r = a.rope.dims
            inv = a.rope.theta ** (-np.arange(0, r, 2) / r)
            if a.rope.kind == "proportional":
                inv[int(dict(a.rope.scaling)["partial_rotary_factor"] * r // 2) :] = 0
            turn = np.exp(1j * x["position"] * inv)
            turned = (q[:, : r // 2] + 1j * q[:, r // 2 : r]) * turn
            q = np.concatenate([turned.real, turned.imag, q[:, r:]], axis=1)
            group = a.heads // a.kv_heads
            mixed = []
            for h in range(a.heads):
                s = k[h // group] @ q[h]
                s = np.exp(s - s.max())
                mixed.append(s / s.sum() @ v[h // group])
            y = y + norm(w.attention.o @ np.concatenate(mixed), w.post_attention_norm)
            z = norm(y, w.pre_mlp_norm)
            gate = w.mlp.gate @ z
            gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            y = (y + norm(w.mlp.down @ (gelu * (w.mlp.up @ z)), w.post_mlp_norm)) * w.scalar
        y = norm(y, p.norm)
        state = p.post @ y
        seen.append(p.embedding @ y)
        token = int(seen[-1].argmax())
        tokens.append(token)
    return tokens, np.stack(seen)


@pytest.mark.parametrize("position", ["draft_window", "draft_serving"])
@pytest.mark.parametrize("family", ["gemma4", "qwen3_5"])
def test_a_chain_equals_plain_numpy(family: str, position: Any) -> None:
    # A partial rotary, and a target whose other layers have no keys.
    changes = {"partial_rotary_factor": 0.5} if family == "qwen3_5" else {}
    target, weights = tiny(family, **changes)
    head, params, borrowed = cases.on_target(target, weights, position=position)
    rope = head.layers[-1].attention.rope
    assert (rope.dims, head.layers[-1].attention.head_dim) == (
        (4, 8) if family == "qwen3_5" else (16, 16)
    )
    lengths = jnp.asarray([14, 5, 2])
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, VOCAB, (3, 14)), jnp.int32)

    @cases.jit
    def run(weights: Any, params: Any) -> Any:
        state, context = cases.from_scratch(target, weights, head, tokens, lengths)
        proposal, _, logits = head.draft(params, borrowed, state, context, 3)
        out = target.forward(weights, tokens)
        return (
            proposal.tokens,
            jnp.stack(logits, 1),
            out.hidden,
            target.entries(out.update, head.reads),
        )

    drafted, logits, hidden, keys = run(weights, params)
    for row, length in enumerate(lengths.tolist()):
        x = {
            "anchor": int(tokens[row, length - 1]),
            "state": np.asarray(hidden[row, length - 2], np.float64),
            "position": length - (1 if position == "draft_window" else 2),
            "keys": [
                tuple(np.asarray(a[row, :, : length - 1], np.float64) for a in kv) for kv in keys
            ],
        }
        wanted = reference(head, params, borrowed, x)
        np.testing.assert_allclose(logits[row], wanted[1], atol=2e-4)
        assert drafted[row].tolist() == wanted[0]


def test_only_the_last_owning_layer_of_each_kind_is_read() -> None:  # F56
    target, weights = tiny("gemma4_e", **SIX_LAYERS)
    head, params, borrowed = cases.on_target(target, weights, layers=4)
    assert (head.reads, head.sources) == ((1, 2), (0, 0, 0, 1))
    decoder = rounds.Decoder(target, head, 2, ())
    lengths = jnp.asarray([12])
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (1, 16)), jnp.int32)

    @cases.jit
    def logits(weights: Any, params: Any, zeroed: jax.Array) -> jax.Array:
        out = target.forward(weights, tokens, lengths - 1)
        cache = target.commit(target.init_cache(1, 16), out.update, lengths - 1)
        layers = tuple(
            jax.tree.map(lambda a, i=i: jnp.where(zeroed == i, 0, a), entry)
            for i, entry in enumerate(cache.layers)
        )
        state = rounds.init_state(decoder, 1, 16, "float32")
        hidden = Gemma4MtpState(out.hidden[:, 10])
        context = DraftContext(
            tokens[:, 11], lengths - 1, tokens, lengths, state.sampling,
            target.entries(layers, head.reads),
        )  # fmt: skip
        return jnp.stack(head.draft(params, borrowed, hidden, context, 2)[2])

    whole = logits(weights, params, jnp.int32(-1))
    moved = [float(jnp.abs(logits(weights, params, jnp.int32(i)) - whole).max()) for i in range(6)]
    assert [m > 1e-3 for m in moved] == [False, True, True, False, False, False]


def test_the_targets_output_layer_is_never_the_heads() -> None:  # F57
    target, weights = tiny("gemma4")
    head, params, borrowed = cases.on_target(target, weights)
    assert head.specs().embedding.shape == (VOCAB, 12) != borrowed.output.shape
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, VOCAB, (1, 9)), jnp.int32)
    state, context = cases.from_scratch(target, weights, head, tokens, jnp.asarray([9]))
    draft = cases.jit(lambda b: head.draft(params, b, state, context, 2)[2])
    same = draft(Borrowed(borrowed.embedding, borrowed.output * jnp.nan))
    np.testing.assert_array_equal(draft(borrowed), same)


def test_a_batch_drafts_what_its_rows_draft_alone() -> None:  # F55
    target, weights = tiny("gemma4")
    head, params, _ = cases.on_target(target, weights)
    rng = np.random.default_rng(5)
    requests = [Request(tuple(map(int, rng.integers(0, VOCAB, n))), 14) for n in (3, 9, 17)]

    def run(concurrency: int, asked: list[Request]) -> list[Any]:
        config = EngineConfig(num_speculative_tokens=3, concurrency=concurrency, capacity=40)
        return Engine(target, weights, head, params, config, ()).generate(asked)

    together = run(3, requests)
    alone = run(1, requests)
    for a, b in zip(together, alone, strict=True):
        assert (a.token_ids, a.rounds, a.accepted) == (b.token_ids, b.rounds, b.accepted)


@pytest.mark.parametrize(("centroids", "position"), [(0, "draft_window"), (8, "draft_serving")])
def test_after_rejections_the_state_is_as_from_scratch(centroids: int, position: Any) -> None:
    target, weights = tiny("gemma4")
    settings = {"centroids": centroids, "centroid_top_k": 3, "position": position}
    head, params, borrowed = cases.on_target(target, weights, **settings)
    rng, k, batch, size = np.random.default_rng(6), 3, 3, 96
    decoder = rounds.Decoder(target, head, k, ())
    both = rounds.Weights(weights, params)
    lengths = jnp.asarray([2, 6, 11])
    prompts = jnp.asarray(rng.integers(0, VOCAB, (batch, size)), jnp.int32)
    state = rounds.init_state(decoder, batch, size, "float32").replace(
        tokens=prompts, budget=jnp.full((batch,), 1000), done=jnp.zeros((batch,), bool)
    )

    @cases.jit
    def prefill(both: Any, state: Any) -> Any:
        return rounds.prefill_chunk(
            decoder, both, state, prompts[:, :11], lengths, jnp.full((batch,), -1)
        )

    @cases.jit
    def one_round(both: Any, state: Any, right: jax.Array, noise: jax.Array) -> Any:
        """As `rounds.one_round`, but the first `right` drafts are true and the others wrong."""
        proposal = rounds.propose(decoder, both, state)
        true = proposal.tokens * 0
        for i in range(k):
            mixed = proposal.replace(tokens=true)
            width, _ = rounds.schedule(decoder, both, state, mixed)
            _, _, logits = rounds.forward(decoder, both, state, mixed, width)
            true = true.at[:, i].set(jnp.argmax(logits[:, i], -1))
        good = jnp.arange(k)[None] < right[:, None]
        mixed = proposal.replace(tokens=jnp.where(good, true, (true + noise) % VOCAB))
        width, _ = rounds.schedule(decoder, both, state, mixed)
        inputs, out, logits = rounds.forward(decoder, both, state, mixed, width)
        verdict = verify(logits, mixed.tokens, None, width, state.sampling, state.lengths)
        after, emitted = rounds.commit(decoder, state, out, verdict)
        seen = rounds.observe(
            decoder, both, state.head, inputs, out, verdict.tokens, emitted, state.lengths - 1
        )
        return after.replace(head=seen), verdict.accepted

    @cases.jit
    def compared(both: Any, state: Any) -> Any:
        context = DraftContext(
            anchor=jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0],
            position=state.lengths - 1,
            tokens=state.tokens,
            lengths=state.lengths,
            sampling=state.sampling,
            keys=target.entries(state.cache.layers, head.reads),
        )
        fresh = cases.from_scratch(target, both.target, head, state.tokens, state.lengths)
        return [
            jnp.stack(head.draft(both.head, borrowed, *given, k)[2])
            for given in ((state.head, context), fresh)
        ]

    state, seen = prefill(both, state), []
    for _ in range(12):
        kept, scratch = compared(both, state)
        np.testing.assert_allclose(kept, scratch, atol=2e-4)
        right = jnp.asarray(rng.integers(0, k + 1, batch))
        noise = jnp.asarray(rng.integers(1, VOCAB, (batch, k)))
        state, accepted = one_round(both, state, right, noise)
        np.testing.assert_array_equal(accepted, right)
        seen += accepted.tolist()
    assert set(seen) == set(range(k + 1))
    assert int(state.lengths.min()) > 2 * WINDOW  # rings have wrapped


def test_rows_without_news_keep_their_state() -> None:
    target, weights = tiny("gemma4")
    head, params, borrowed = cases.on_target(target, weights)
    before = Gemma4MtpState(jnp.ones((2, 32)))
    states = jnp.arange(2 * 4 * 32, dtype=jnp.bfloat16).reshape(2, 4, 32)
    zeros = jnp.zeros((2, 4), jnp.int32)
    seen = Observation(zeros, zeros, states, states[None][:0], jnp.asarray([0, 3]), zeros[:, 0])
    after = head.observe(params, borrowed, before, seen)
    np.testing.assert_array_equal(after.hidden[0], before.hidden[0])
    np.testing.assert_array_equal(after.hidden[1], states[1, 2].astype(jnp.float32))


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_for_every_family_with_ordinary_keys(family: str) -> None:
    info = tiny(family)[0].info
    if family == "deepseek_v3":
        with pytest.raises(PairingError, match="keeps no ordinary keys"):
            Gemma4MtpHead.for_target(info)
        return
    head = Gemma4MtpHead.for_target(info)
    assert hash(head) == hash(Gemma4MtpHead.for_target(info))
    assert (head.hidden, head.layers[0].mlp, len(head.layers)) == (8, 64, 4)
    for layer, source in zip(head.layers, head.sources, strict=True):
        key = info.key_layers[head.reads[source]]
        assert layer.attention.keys == key.cache and layer.attention.rope == key.rope
    gemma = family.startswith("gemma4")
    assert [head.window(i) for i in range(4)] == [WINDOW if gemma else None] * 3 + [None]
    table = jnp.ones((VOCAB, 32)) * jnp.arange(VOCAB)[:, None]
    q_norm = head.init(jax.random.key(0), Borrowed(table, table)).layers[0].attention.q_norm
    assert float(q_norm[0]) == pytest.approx(1 if gemma else 8**-0.5)


def test_caches_of_another_dtype_are_read() -> None:
    target, weights = tiny("gemma4")
    head, params, borrowed = cases.on_target(target, weights)
    tokens = jnp.asarray(np.random.default_rng(10).integers(0, VOCAB, (1, 9)), jnp.int32)
    state, context = cases.from_scratch(target, weights, head, tokens, jnp.asarray([9]))
    assert isinstance(context.keys[1], FullCache)
    short = context.replace(keys=jax.tree.map(lambda a: a.astype(jnp.bfloat16), context.keys))
    draft = cases.jit(lambda c: head.draft(params, borrowed, state, c, 1)[2][0])
    np.testing.assert_allclose(draft(short), draft(context), atol=0.3)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(PairingError, match=r"Gemma4Mtp\.heads 3 do not divide over the 2"):
        Gemma4MtpHead.for_target(tiny("gemma4")[0].info, Gemma4MtpConfig(heads=3))
