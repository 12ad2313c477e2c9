"""The shipped heads: built whole without memory, of the sizes published, refused where they should.

Facts here were put down by hand from the published tables, not read from our configurations.
"""

import math
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from specjax.core import paths
from specjax.core.errors import CheckpointError, PairingError
from specjax.core.params import leaves_with_names, shapes
from specjax.heads import catalog
from specjax.heads.base import Borrowed, DraftContext, Observation
from specjax.layers.sampling import Sampling
from specjax.targets import catalog as targets


class Plain(NamedTuple):
    """A head of Qwen3's or Llama's layers; `ids` as published, `first` what stream id 0 is."""

    target: str
    algorithm: str
    ids: tuple[int, ...]
    first: int
    width: int
    layers: int
    heads: tuple[int, int, int]
    mlp: int
    most: int | None
    mask: int | None = None
    window: tuple[int, int] = (0, 0)  # sliding layers, what they see
    draft_vocab: int = 0  # 0: all, and no maps
    copies: bool = True  # embedding and output layer are stored
    embedding: bool = True
    norms: bool = True  # on queries and keys
    markov: int = 0


QWEN3, QWEN3_14B = (1, 9, 17, 25, 33), (1, 10, 19, 28, 37)
R8 = (2, 10, 18, 26, 34)
V = {"Qwen3-": 151936, "Qwen3.5": 248320, "gemma-4": 262144, "Kimi": 163840}
A, B, C, G = (32, 8, 128), (40, 8, 128), (64, 8, 128), (32, 16, 256)
PLAIN = {
    f"{algorithm}_{short}_{'ttt7' if algorithm == 'eagle3' else 'block7'}": Plain(
        target, algorithm, ids, 1, width, 1 if algorithm == "eagle3" else 5, heads, mlp,
        None if algorithm == "eagle3" else 7, None if algorithm == "eagle3" else 151669,
        markov=256 if algorithm == "dspark" else 0,
    )
    for algorithm in ("eagle3", "dflash", "dspark")
    for short, target, ids, width, heads, mlp in (
        ("qwen3_4b", "Qwen3-4B", QWEN3, 2560, A, 9728),
        ("qwen3_8b", "Qwen3-8B", QWEN3, 4096, A, 12288),
        ("qwen3_14b", "Qwen3-14B", QWEN3_14B, 5120, B, 17408),
    )
} | {
    name: Plain(
        target, "dflash", ids, 1, width, layers, heads, mlp, most, mask, window, copies=False
    )
    for name, target, layers, width, mlp, heads, window, most, ids, mask in (
        ("Qwen3-8B-DFlash-b16", "Qwen3-8B", 5, 4096, 12288, A, (0, 0), 15, QWEN3, 151669),
        ("Qwen3-4B-DFlash-b16", "Qwen3-4B", 5, 2560, 9728, A, (0, 0), 15, QWEN3, 151669),
        ("Qwen3.5-122B-A10B-DFlash", "Qwen3.5-122B-A10B", 6, 3072, 9216, A, (5, 4096), 15,
         (1, 7, 14, 20, 26, 32, 39, 45), 248077),
        ("Qwen3.5-35B-A3B-DFlash", "Qwen3.5-35B-A3B", 6, 2048, 6144, A, (5, 4096), 15,
         (1, 6, 11, 16, 22, 27, 32, 37), 248077),
        ("Qwen3.5-35B-A3B-DFlash-rev1", "Qwen3.5-35B-A3B", 8, 2048, 6144, (32, 4, 128), (0, 0), 15,
         QWEN3_14B, 248070),
        ("Qwen3.5-4B-DFlash", "Qwen3.5-4B", 6, 2560, 9216, A, (5, 4096), 15,
         (1, 5, 9, 13, 17, 21, 25, 29), 248077),
        ("Qwen3.5-4B-DFlash-rev1", "Qwen3.5-4B", 5, 2560, 9728, A, (0, 0), 15,
         (1, 8, 15, 22, 29), 248070),
        ("Kimi-K2.5-DFlash", "Kimi-K2.5", 6, 7168, 18432, C, (0, 0), 7,
         (1, 12, 24, 35, 47, 58), 163838),
        ("gemma-4-31B-it-DFlash", "gemma-4-31B-it", 5, 5376, 10752, C, (4, 2048), 15,
         (1, 12, 23, 35, 46, 57), 4),
        ("gemma-4-26B-A4B-it-DFlash", "gemma-4-26B-A4B-it", 5, 2816, 5632, A, (4, 2048), 15,
         (1, 6, 11, 17, 22, 27), 4),
        ("gemma4-12B-it-DFlash", "gemma-4-12B-it", 5, 3840, 7680, A, (4, 2048), 15,
         (1, 10, 19, 27, 36, 45), 4),
    )
} | {
    "Kimi-K25-eagle3": Plain(
        "Kimi-K2.5", "eagle3", (2, 30, 58), 0, 7168, 1, (64, 64, 128), 18432, None,
        draft_vocab=32000, embedding=False, norms=False,
    ),
    "Qwen3-8B-speculator.eagle3": Plain(
        "Qwen3-8B", "eagle3", (2, 18, 33), 0, 4096, 1, A, 12288, None, draft_vocab=32000,
        norms=False,
    ),
    "Qwen3-8B-speculator.dflash": Plain(
        "Qwen3-8B", "dflash", R8, 0, 4096, 5, A, 12288, 7, 151669, draft_vocab=32000
    ),
    "Qwen3-30B-A3B-speculator.dflash": Plain(
        "Qwen3-30B-A3B", "dflash", (1, 12, 23, 34, 45), 0, 2048, 5, (32, 4, 128), 6144, 7, 151669,
        draft_vocab=32000,
    ),
    "gemma-4-31B-it-speculator.eagle3": Plain(
        "gemma-4-31B-it", "eagle3", (2, 30, 57), 0, 5376, 1, G, 21504, None, draft_vocab=32000,
        norms=False,
    ),
    "gemma-4-26B-A4B-it-speculator.eagle3": Plain(
        "gemma-4-26B-A4B-it", "eagle3", (2, 15, 27), 0, 2816, 1, (16, 8, 256), 2112, None,
        draft_vocab=32000, norms=False,
    ),
    "gemma-4-31B-it-speculator.dspark": Plain(
        "gemma-4-31B-it", "dspark", (1, 17, 29, 47, 58), 0, 5376, 5, G, 21504, 7, 4, (5, 2048),
        32000, markov=256,
    ),
}  # fmt: skip
GEMMA_IDS = (5, 17, 29, 41, 46)
GEMMA = ("eagle3_gemma4_12b_ttt7", "dflash_gemma4_12b_block7", "dspark_gemma4_12b_block7")
# (width, width of the target, mlp, query heads, centroids, layers of the target that are read)
ASSISTANTS = {
    "gemma-4-E2B-it": (256, 1536, 2048, 4, True, {13, 14}),
    "gemma-4-E4B-it": (256, 2560, 2048, 4, True, {22, 23}),
    "gemma-4-12B-it": (1024, 3840, 8192, 16, False, {46, 47}),
    "gemma-4-26B-A4B-it": (1024, 2816, 8192, 16, False, {28, 29}),
    "gemma-4-31B-it": (1024, 5376, 8192, 32, False, {58, 59}),
}
# Billions of a target's MTP modules, without their copies of embedding and output layer.
MODULES = {
    "DeepSeek-V3": "11.61",
    "Qwen3.5-0.8B": "0.020",
    "Qwen3.5-122B-A10B": "2.52",
    "Qwen3.5-35B-A3B": "0.845",
    "Qwen3.5-4B": "0.121",
}
ALL = (*PLAIN, *GEMMA, *(f"{name}-assistant" for name in ASSISTANTS))
# Billions stored, as counted from the published tables, with their digits.
COUNTED = {
    "dspark_qwen3_4b_block7": "1.393",
    "dspark_qwen3_8b_block7": "2.371",
    "dspark_qwen3_14b_block7": "3.416",
    "dspark_gemma4_12b_block7": "3.430",
    "dflash_qwen3_4b_block7": "1.315",
    "dflash_qwen3_8b_block7": "2.293",
    "dflash_qwen3_14b_block7": "3.338",
    "dflash_gemma4_12b_block7": "3.296",
    "Qwen3-30B-A3B-speculator.dflash": "0.680813824",
    "gemma-4-E2B-it-assistant": "0.0777",
    "gemma-4-E4B-it-assistant": "0.0785",
    "gemma-4-12B-it-assistant": "0.4229",
    "gemma-4-26B-A4B-it-assistant": "0.4197",
    "gemma-4-31B-it-assistant": "0.4695",
}
BYTES = {
    "gemma-4-31B-it-speculator.eagle3": 4_470_642_280,
    "gemma-4-26B-A4B-it-speculator.eagle3": 1_855_768_160,
    "gemma-4-E2B-it-assistant": 157_565_344,
    "gemma-4-E4B-it-assistant": 159_138_208,
    "gemma-4-12B-it-assistant": 845_719_296,
    "gemma-4-26B-A4B-it-assistant": 839_427_840,
    "gemma-4-31B-it-assistant": 939_042_560,
}
GIB = {"Qwen3-8B-DFlash-b16": 1.95, "Qwen3-4B-DFlash-b16": 1.00, "Kimi-K2.5-DFlash": 6.48}
NAMED = {"dspark_qwen3_4b_block7": 1.39, "dspark_gemma4_12b_block7": 3.43}


@pytest.fixture(scope="module")
def infos():
    return {name: targets.read(name).build().info for name in targets.names()}


@pytest.fixture(scope="module")
def built(infos):
    entries = [catalog.read(name) for name in ALL]
    return {entry.name: entry.build(infos[entry.targets[0]]) for entry in entries}


def specs(head):
    return {spec.hf: spec for _, spec in leaves_with_names(head.specs())}


def stored(head) -> int:
    """Numbers that a checkpoint holds, without tables of ids."""
    return sum(math.prod(spec.shape) for spec in specs(head).values() if not spec.dtype)


def vocabulary(target: str) -> int:
    return next(size for start, size in V.items() if target.startswith(start))


def plain_size(p: Plain) -> int:
    """Count a plain head by hand."""
    heads, kv_heads, head_dim = p.heads
    inputs = 2 * p.width if p.algorithm == "eagle3" else p.width
    attention = inputs * (heads + 2 * kv_heads) * head_dim + heads * head_dim * p.width
    attention += 2 * head_dim if p.norms else 0
    per_layer = attention + 3 * p.width * p.mlp + (3 if p.algorithm == "eagle3" else 2) * p.width
    total = p.layers * per_layer + len(p.ids) * p.width**2 + p.width
    total += p.width if p.algorithm != "eagle3" else 0  # the context's norm
    vocab = vocabulary(p.target)
    drafted = p.draft_vocab or vocab
    if p.copies:
        total += (drafted + vocab * p.embedding) * p.width
    if p.markov:  # with the confidence head, which sees the token before
        total += p.markov * (vocab + drafted) + p.width + p.markov + 1
    return total


def gemma_size(algorithm: str) -> int:
    """Count a head with layers of gemma-4-12B's full-attention ones by hand: values are keys."""
    width, heads, head_dim, mlp, vocab = 3840, 16, 512, 15360, 262144
    layers, inputs = (1, 2 * width) if algorithm == "eagle3" else (5, width)
    layer = inputs * (heads + 1) * head_dim + heads * head_dim * width + 2 * head_dim
    layer += 3 * width * mlp + (5 if algorithm == "eagle3" else 4) * width + 1
    total = layers * layer + 5 * width**2 + width + 2 * vocab * width
    total += width if algorithm != "eagle3" else 0
    return total + (256 * 2 * vocab + width + 256 + 1 if algorithm == "dspark" else 0)


def assistant_size(name: str) -> int:
    """Count an assistant by hand: queries alone, three sliding layers and a full one."""
    width, target, mlp, heads, centroids, _ = ASSISTANTS[name]
    total = 262144 * width + 3 * target * width + width + 2048 * width * centroids
    for head_dim in (256, 256, 256, 512):
        total += 2 * heads * head_dim * width + head_dim + 3 * width * mlp + 4 * width + 1
    return total


def test_names() -> None:
    assert set(catalog.names()) == set(ALL)
    assert list(catalog.names()) == sorted(ALL, key=str.lower)
    assert catalog.modules() == tuple(f"{name}:mtp" for name in MODULES)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_heads(built, name: str) -> None:
    head, p = built[name], PLAIN[name]
    assert catalog.read(name).targets == (p.target,)
    assert (head.name, head.taps) == (p.algorithm, tuple(i + p.first for i in p.ids))
    assert stored(head) == plain_size(p)
    assert head.max_tokens == p.most
    assert head.draft_vocab == (p.draft_vocab or vocabulary(p.target))
    assert head.mapped == (p.draft_vocab > 0)
    if p.algorithm != "eagle3":
        windows = [head.window(i) for i in range(p.layers)]
        assert windows == [p.window[1]] * p.window[0] + [None] * (p.layers - p.window[0])
        assert head.config.mask_token_id == p.mask
        assert head.config.confidence == (p.algorithm == "dspark")


@pytest.mark.parametrize("name", GEMMA)
def test_heads_of_gemma_layers(built, name: str) -> None:
    head = built[name]
    algorithm = name.partition("_")[0]
    assert (head.name, head.taps) == (algorithm, tuple(i + 1 for i in GEMMA_IDS))
    assert stored(head) == gemma_size(algorithm)
    assert (head.embed_scale, head.softcap) == (3840**0.5, 30)
    rope = head.geometry.rope
    assert (rope.theta, rope.kind, rope.dims) == (1e6, "proportional", 512)
    assert catalog.read(name).targets == ("gemma-4-12B-it",)


@pytest.mark.parametrize("target", ASSISTANTS)
def test_assistants(built, target: str) -> None:
    head = built[f"{target}-assistant"]
    assert head.name == "gemma4_mtp"
    assert stored(head) == assistant_size(target)
    # The last sliding and the last full layer that own keys and values.
    assert set(head.reads) == ASSISTANTS[target][-1]
    ordering = specs(head).get("masked_embedding.token_ordering")
    assert (ordering is not None) == ASSISTANTS[target][4]


def test_ropes(built) -> None:
    bases = {name: head.geometry.rope for name, head in built.items() if name in PLAIN}
    for name, rope in bases.items():
        p = PLAIN[name]
        expected = 1e6
        if p.target.startswith("Qwen3.5"):
            expected = 1e7
        elif name == "Kimi-K2.5-DFlash":
            expected = 5e4
        elif "it-speculator" in name:
            expected = 1e4
        assert (rope.theta, rope.dims) == (expected, p.heads[2]), name
        assert rope.kind == ("yarn" if name == "Kimi-K2.5-DFlash" else "default")
    numbers = dict(bases["Kimi-K2.5-DFlash"].scaling)
    assert (numbers["factor"], numbers["original_max_position_embeddings"]) == (64, 4096)


def test_published_figures(built) -> None:
    for name, figure in COUNTED.items():
        digits = len(figure.partition(".")[2])
        assert f"{stored(built[name]) / 1e9:.{digits}f}" == figure, name
    on_disk = {"d2t": 8, "t2d": 1, "masked_embedding.token_ordering": 8}
    for name, released in BYTES.items():
        tables = [s for s in specs(built[name]).values() if s.dtype]
        size = 2 * stored(built[name])
        size += sum(math.prod(s.shape) * on_disk[s.hf] for s in tables)
        assert 1_600 <= released - size <= 7_200, name  # the file's header
    for name, gib in GIB.items():
        assert round(2 * stored(built[name]) / 2**30, 2) == gib
    for name in ALL:
        published = catalog.read(name).published
        assert published.bytes == BYTES.get(name)
        assert published.gib == GIB.get(name)
        exact = {"Qwen3-30B-A3B-speculator.dflash": 0.680813824}
        assert published.billions == {**NAMED, **exact}.get(name)


@pytest.mark.parametrize("name", ALL)
def test_stored_tensors_are_those_of_the_head(built, infos, name: str) -> None:
    entry, held = catalog.read(name), specs(built[name])
    for tensor, shape in entry.stores.items():
        assert held[tensor].shape == shape
    # All shapes, as a checkpoint has them, say no more than those that are put down.
    whole = {tensor: spec.shape for tensor, spec in held.items()}
    reader = catalog.layouts(entry.kind)
    assert reader.read_head(entry.config, whole, infos[entry.targets[0]], name) == built[name]


@pytest.mark.parametrize("name", ALL)
def test_other_targets_are_refused(infos, name: str) -> None:
    entry = catalog.read(name)
    for target, info in infos.items():
        if target not in entry.targets:
            with pytest.raises(PairingError) as caught:
                entry.build(info)
            assert str(caught.value).startswith(name)
            own = infos[entry.targets[0]]
            if info.vocab != own.vocab:
                assert f"{own.vocab}" in str(caught.value)
                assert f"{info.vocab}" in str(caught.value)
            elif info.hidden != own.hidden:
                assert f"{own.hidden}" in str(caught.value)
                assert f"{info.hidden}" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "eagle3_qwen3_8b_ttt7",
        "eagle3_gemma4_12b_ttt7",
        "Kimi-K25-eagle3",
        "dspark_gemma4_12b_block7",
        "Kimi-K2.5-DFlash",
        "gemma-4-31B-it-speculator.dspark",
        "gemma-4-E2B-it-assistant",
        "gemma-4-31B-it-assistant",
        "Qwen3.5-35B-A3B:mtp",
        "DeepSeek-V3:mtp",
    ],
)
def test_a_round_in_the_abstract(name: str) -> None:
    entry = catalog.read(name)
    target = targets.read(entry.targets[0]).build()
    info, num = target.info, 3
    head = entry.build(info)

    def run(params, matrix, taps, hidden):
        borrowed = Borrowed(embedding=matrix, output=matrix)
        ids = jnp.zeros((2, 4), jnp.int32)
        count = jnp.asarray([4, 2])
        cache = target.init_cache(2, 16, "bfloat16")
        state = head.init_state(2, 16, "bfloat16")
        obs = Observation(ids, ids, hidden, taps, count, jnp.zeros_like(count))
        after = head.observe(params, borrowed, state, obs)
        keys = target.entries(cache.layers, head.reads)
        context = DraftContext(ids[:, 0], count, ids, count + 1, Sampling.of(2, 1.0), keys)
        return state, after, head.propose(params, borrowed, after, context, num)

    def abstract(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    state, after, proposal = jax.eval_shape(
        run,
        shapes(head.specs(), "bfloat16"),
        abstract(info.vocab, info.hidden),
        abstract(len(head.taps), 2, 4, info.hidden),
        abstract(2, 4, info.hidden),
    )
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(after)]
    assert proposal.tokens.shape == (2, num)
    assert proposal.probs.shape == (2, num, info.vocab)


def test_what_is_not_verified_is_marked() -> None:
    entries = [catalog.read(name) for name in catalog.names()]
    assert all(entry.source and entry.targets for entry in entries)
    for entry in entries:
        assert set(entry.targets) <= set(targets.names())
        for fact in entry.unverified:
            field, _, why = fact.partition(": ")
            assert field and why
    marked = {entry.name for entry in entries if entry.unverified}
    assert {"gemma4-12B-it-DFlash", "Kimi-K25-eagle3"} <= marked
    assert not marked & {name for name in ALL if name.endswith(("block7", "ttt7", "assistant"))}


def test_an_entry_is_a_published_configuration() -> None:
    entry = catalog.read("Qwen3-8B-speculator.dflash")
    assert "specjax" not in entry.config
    assert entry.kind == "dflash"
    assert entry.drafts == 7
    # z-lab's second revision holds the block's size inside dflash_config.
    config = catalog.read("Qwen3.5-4B-DFlash").config
    assert config["dflash_config"]["block_size"] == 16
    assert "block_size" not in config


def test_modules_inside_a_target(infos) -> None:
    entry = catalog.read("Qwen3.5-4B:mtp")
    assert (entry.kind, entry.targets) == ("mtp", ("Qwen3.5-4B",))
    assert entry.config == targets.read("Qwen3.5-4B").config
    for name, figure in MODULES.items():
        head = catalog.read(f"{name}:mtp").build(infos[name])
        assert (head.name, head.modules) == ("mtp", 1)
        assert f"{stored(head) / 1e9:.{len(figure.partition('.')[2])}f}" == figure
    with pytest.raises(CheckpointError, match="no head 'Qwen3-8B:mtp'"):
        catalog.read("Qwen3-8B:mtp")


def test_unknown_name() -> None:
    with pytest.raises(CheckpointError, match=r"no head 'qwen3-8b-dflash-b16' .* 'Qwen3-8B-DFlash"):
        catalog.read("qwen3-8b-dflash-b16")
    with pytest.raises(CheckpointError, match=r"no head '\.\./targets/Qwen3-8B'"):
        catalog.read("../targets/Qwen3-8B")


def test_malformed_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "heads").mkdir()
    monkeypatch.setattr(paths, "configs_dir", lambda: tmp_path)
    assert catalog.names() == ()
    (tmp_path / "heads" / "a.json").write_text('{"specjax": {"source": "x", "drafts": 1}}')
    with pytest.raises(CheckpointError, match="lacks targets, published, stores, unverified"):
        catalog.read("a")
    (tmp_path / "heads" / "a.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        catalog.read("a")


def test_what_is_no_head() -> None:
    with pytest.raises(CheckpointError, match="is no draft head"):
        catalog.kind_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "x")


def test_names_are_light() -> None:
    code = """
import sys
from specjax.heads import catalog
assert catalog.names()
assert not {"jax", "flax", "numpy"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
