"""Heads in other layouts than their own: what is written drafts the same, or is refused."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import heads
from specjax.core.errors import PairingError
from specjax.heads import pairing
from specjax.heads.base import Borrowed, DraftContext, Observation
from specjax.heads.export import Verifier, convert, export
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead
from specjax.io.hf import TensorReader, read_config
from specjax.layers.sampling import Sampling
from tests.heads.dflash import cases as blocks
from tests.heads.eagle3 import cases as chains
from tests.heads.gemma4_mtp import cases as assistants

KEPT = np.arange(1, 40, 2)
TARGET = Verifier("owner/target", ("LlamaForCausalLM",))
FROM_ANCHOR = {**blocks.DFLASH, "sample_from_anchor": True}


@partial(chains.jit, static_argnums=(0, 5))
def _draft(
    head: Any, params: Any, lent: Borrowed, seen: Observation, around: DraftContext, num: int
) -> Any:
    state = head.observe(params, lent, head.init_state(1, 16), seen)
    return head.draft(params, lent, state, around, num)


def drafted(head: Any, params: Any, lent: Borrowed, hidden: int = 16) -> Any:
    """Drafts and their logits after seven random positions."""
    rng = np.random.default_rng(2)
    states = jnp.asarray(rng.normal(size=(max(len(head.taps), 1), 1, 7, hidden)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 40, (1, 8)), jnp.int32)
    seen = Observation(
        tokens=tokens[:, :-1],
        next_tokens=tokens[:, 1:],
        hidden=states[0],
        taps=states,
        count=jnp.asarray([7]),
        start=jnp.asarray([0]),
    )
    around = DraftContext(
        anchor=tokens[:, -1],
        position=jnp.asarray([7]),
        tokens=tokens,
        lengths=jnp.asarray([8]),
        sampling=Sampling.of(1),
    )
    return _draft(head, params, lent, seen, around, 4)


def make(name: str) -> tuple[Any, Any, Borrowed, Any]:
    """Return (head, weights, the target's tables, its facts)."""
    chain = chains.info(hidden=16, vocab=40, num_layers=6, max_context=128)
    if name == "eagle3":
        return *chains.tiny(KEPT), chain
    if name == "eagle3-qwen":
        head, _, lent = chains.tiny()
        block = dataclasses.replace(head.geometry.block, qk_norm=True)
        geometry = dataclasses.replace(head.geometry, block=block)
        head = dataclasses.replace(head, geometry=geometry)
        return head, head.init(jax.random.key(3), lent), lent, chain
    if name == "mtp":
        facts = blocks.info()
        head = MtpHead.for_target(facts, MtpConfig(modules=1))
        return head, head.init(jax.random.key(1), blocks.borrowed()), blocks.borrowed(), facts
    settings, kept = {
        "dflash": (blocks.DFLASH, None),
        "dflash-mapped": (blocks.DFLASH, KEPT),
        "dflash-anchor": (FROM_ANCHOR, None),
        "dspark": (blocks.DSPARK, None),
        "dspark-mapped": (blocks.DSPARK, KEPT),
    }[name]
    return *blocks.tiny(settings, kept), blocks.borrowed(), blocks.info()


@pytest.mark.parametrize("bodies_only", [False, True], ids=["whole", "bodies"])
@pytest.mark.parametrize(
    ("name", "layout", "written"),
    [
        ("eagle3", "original", "safeai"),
        ("eagle3", "speculators", "speculators"),
        ("eagle3-qwen", "original", "deepspec"),
        ("eagle3-qwen", "speculators", "speculators"),
        ("dflash", "original", "zlab"),
        ("dflash", "speculators", "speculators"),
        ("dflash-mapped", "speculators", "speculators"),
        ("dflash-anchor", "original", "deepspec"),
        ("dspark", "original", "deepspec"),
        ("dspark-mapped", "speculators", "speculators"),
        ("mtp", "speculators", "speculators"),
        ("eagle3", "own", "own"),
        ("dspark-mapped", "own", "own"),
    ],
)
def test_an_export_drafts_as_the_head_did(
    name: str, layout: str, written: str, bodies_only: bool, tmp_path: Path
) -> None:
    head, params, lent, facts = make(name)
    done = export(
        head, params, lent, tmp_path, layout=layout, verifier=TARGET, bodies_only=bodies_only
    )
    assert done.layout == written
    again, loaded = heads.load(tmp_path, facts, borrowed=lent)
    assert again.taps == head.taps and again.name == head.name
    if not bodies_only:  # the same weights, as tests/heads/test_pairing.py has it
        before, after = drafted(head, params, lent), drafted(again, loaded, lent)
        jax.tree.map(np.testing.assert_array_equal, before, after)
    config = read_config(tmp_path)
    if written == "speculators":
        assert config["speculators_config"]["verifier"] == {
            "name_or_path": "owner/target",
            "architectures": ["LlamaForCausalLM"],
        }
    # F39: the rows are in the file and the target's own, or the file names the target.
    stored = TensorReader(tmp_path)
    missing = {"embedding": "embed_tokens.weight", "output": "lm_head.weight"}
    if "embed_tokens.weight" in stored.shapes:
        np.testing.assert_array_equal(stored.read("embed_tokens.weight"), lent.embedding)
    lacks = [row for row, tensor in missing.items() if tensor not in stored.shapes]
    assert config.get(pairing.FIELD, {"rows": []})["rows"] == lacks
    if bodies_only:
        assert lacks == ["embedding", "output"]  # untrained: both are the target's
        with pytest.raises(PairingError):
            other = Borrowed(lent.embedding + 1, lent.output)
            heads.load(tmp_path, facts, borrowed=other)


def test_an_output_that_was_trained_stays_in_the_file(tmp_path: Path) -> None:
    head, params, lent, facts = make("eagle3")
    params = dataclasses.replace(params, output=params.output * 1.5)
    done = export(
        head, params, lent, tmp_path, layout="original", verifier=TARGET, bodies_only=True
    )
    assert done.left_out == () and done.from_target == ("embedding",)
    _, loaded = heads.load(tmp_path, facts, borrowed=lent)
    np.testing.assert_array_equal(loaded.output, params.output)


def test_an_assistant_keeps_its_own_embedding(tmp_path: Path) -> None:
    facts = assistants.info()
    head, params = heads.load(assistants.FIXTURE, facts)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(facts.vocab, facts.hidden)), jnp.float32)
    lent = Borrowed(table, table)
    done = export(
        head, params, lent, tmp_path, layout="original", verifier=TARGET, bodies_only=True
    )
    assert (done.layout, done.left_out) == ("gemma4_assistant", ())
    again, loaded = heads.load(tmp_path, facts, borrowed=lent)
    assert again == head
    jax.tree.map(np.testing.assert_array_equal, params, loaded)
    with pytest.raises(PairingError, match="are others"):
        heads.load(tmp_path, facts, borrowed=Borrowed(table + 1, table))


@pytest.mark.parametrize(
    ("name", "layout", "reason"),
    [
        ("eagle3", "deepspec", "draft vocabulary"),
        ("eagle3", "zlab", "cannot be written in 'zlab' layout; have speculators"),
        ("eagle3-qwen", "safeai", "norms of queries and keys"),
        ("dflash-mapped", "original", "zlab has no draft vocabulary; deepspec has no slots"),
        ("dflash-anchor", "zlab", "sample_from_anchor"),
        ("dspark-mapped", "original", "deepspec has no draft vocabulary"),
        ("mtp", "original", "have speculators"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(name: str, layout: str, reason: str) -> None:
    head, params, lent, _ = make(name)
    with pytest.raises(PairingError, match=reason):
        convert(head, params, layout, lent)


@pytest.mark.parametrize(
    ("name", "layout", "changes", "reason"),
    [
        ("dflash", "speculators", {"softcap": 5.0}, "capped logits"),
        ("dflash", "speculators", {"embed_scale": 4.0}, "scaled embeddings"),
        ("eagle3", "speculators", {"embed_scale": 4.0}, "scaled embeddings"),
        ("eagle3", "original", {"softcap": 5.0}, "capped logits"),
        ("mtp", "speculators", {"embed_scale": 4.0}, "scaled embeddings"),
        ("mtp", "speculators", {"config": MtpConfig(modules=1, carried="raw")}, "carried raw"),
    ],
)
def test_what_another_reader_would_compute_otherwise_is_refused(
    name: str, layout: str, changes: dict[str, Any], reason: str
) -> None:
    head, params, lent, _ = make(name)
    with pytest.raises(PairingError, match=reason):
        convert(dataclasses.replace(head, **changes), params, layout, lent)


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"causal": "all"}, "is_causal", True),
        ({"causal": "none", **blocks.SLIDING}, "is_causal", False),
        (
            {"causal": "none", "layout": "speculators", **blocks.SLIDING},
            "sliding_window_non_causal",
            True,
        ),
    ],
    ids=["all", "none", "speculators"],
)
def test_both_ways_out_say_which_slots_are_causal(
    settings: dict[str, Any], field: str, value: bool, tmp_path: Path
) -> None:  # F40
    head, params = blocks.tiny({**blocks.DFLASH, **settings})
    heads.save(head, params, tmp_path / "saved")
    layout = "speculators" if "layout" in settings else "original"
    export(head, params, blocks.borrowed(), tmp_path / "out", layout=layout, verifier=TARGET)
    for folder in ("saved", "out"):
        assert read_config(tmp_path / folder)[field] is value
        assert heads.load(tmp_path / folder, blocks.info())[0] == head


def test_windows_do_not_change_their_meaning() -> None:
    head, params = blocks.tiny({**blocks.DFLASH, **blocks.SLIDING})
    assert head.config.layout == "zlab"
    with pytest.raises(PairingError, match="windows counted as this head's are"):
        convert(head, params, "speculators", blocks.borrowed())


def test_a_layout_without_tables_refuses_a_head_that_has_others() -> None:
    head, params = blocks.tiny({**blocks.DFLASH, "layout": "speculators"})
    params = dataclasses.replace(params, output=params.output * 2)
    with pytest.raises(PairingError, match="stores no output rows"):
        convert(head, params, "zlab", blocks.borrowed())


def test_heads_without_weights_have_no_layout() -> None:
    with pytest.raises(PairingError, match="no published layout"):
        convert(heads.find("ngram", "", None)[0], (), "original", blocks.borrowed())
