"""How arrays lie over a mesh: single rules, and whole rounds of tiny pairs."""

import dataclasses
import re
from functools import partial

import jax
import pytest

from specjax.core.errors import ConfigError
from specjax.core.mesh_config import MeshConfig
from specjax.core.params import shapes
from specjax.core.sharding import SERVED, Layout
from specjax.decode.placement import shardings
from specjax.decode.round import Decoder, Weights, init_state, one_round
from specjax.heads.base import NullHead
from specjax.planner.cost import Cost
from specjax.planner.pair import Memory, Pair, layout_of, trace_round
from specjax.planner.spread import NONE, reshaped
from specjax.selfcheck.tiny import FAMILIES, make_head, make_target
from specjax.targets import TargetConfig, from_config

T = frozenset({"tensor"})


@pytest.mark.parametrize(
    ("dims", "old", "new", "then"),
    [
        ((T, NONE), (8, 4), (32,), (T,)),
        ((T,), (32,), (8, 4), (T, NONE)),
        ((NONE, T, NONE), (2, 8, 4), (2, 32), (NONE, T)),
        ((NONE, T), (2, 32), (2, 1, 8, 4), (NONE, NONE, T, NONE)),
        ((T, NONE), (8, 1), (8,), (T,)),
        ((NONE, NONE), (0, 4), (0, 2, 2), (NONE, NONE, NONE)),
    ],
)
def test_reshape(dims, old, new, then) -> None:
    assert tuple(reshaped(dims, old, new)) == then


def _pair(family: str, head: str = "", loop: str = "scan", **changes: int) -> Pair:
    config = FAMILIES[family] | changes
    target = from_config(config, TargetConfig(layer_loop=loop))
    drafter = NullHead()
    if head:
        small, params = make_target(family)
        drafter, _ = make_head(head, small, params)
    return Pair("tiny", head, target, drafter, target.specs(), drafter.specs())


def _round(pair: Pair, drafts: int = 0, batch: int = 4, **mesh: int) -> tuple[Cost, Memory]:
    return trace_round(
        pair,
        drafts,
        batch,
        64,
        dtype="float32",
        cache_dtype="float32",
        platform="cuda",
        layout=layout_of(MeshConfig(**mesh)),
    )


@pytest.fixture(scope="module")
def llama() -> Pair:
    return _pair("llama")


def test_tensor_parallel_shares_products_and_adds_up_twice_a_layer(llama: Pair) -> None:
    alone, whole = _round(llama)
    shared, part = _round(llama, tensor=2)
    assert shared.flops == alone.flops / 2
    assert part.target < 0.51 * whole.target  # all but norms
    assert alone.exchanges == alone.sent == 0
    deeper, _ = _round(_pair("llama", num_hidden_layers=5), tensor=2)
    assert deeper.stage("forward").exchanges - shared.stage("forward").exchanges == 2 * 2
    # Each sum of 4 rows of 32 float32 goes round a ring of two: half of it out, twice.
    sent = deeper.stage("forward").sent - shared.stage("forward").sent
    assert sent == 4 * (2 * (1 / 2) * 4 * 32 * 4)


def test_lanes_over_data_share_all_but_weights(llama: Pair) -> None:
    alone, whole = _round(llama)
    shared, part = _round(llama, data=2)
    assert shared.flops == alone.flops / 2
    assert shared.exchanges == 0
    assert part.target == whole.target
    assert part.state == pytest.approx(whole.state / 2)


def test_experts_add_up_once_a_layer() -> None:
    alone, whole = _round(_pair("qwen3_moe"))
    shared, part = _round(_pair("qwen3_moe"), expert=4)
    assert shared.stage("forward").exchanges == 3
    held = 3 * 3 * 8 * 16 * 32 * 4  # layers, tables, experts, width, hidden, float32
    assert whole.target - part.target == held * 3 / 4
    # Of the products only those of experts are shared out: 8 pairs in blocks of 4 rows at most.
    assert shared.flops < alone.flops


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_both_layer_loops_cost_the_same_products(loop: str) -> None:
    family = "gemma4_moe"
    cost, _ = _round(_pair(family, loop=loop))
    assert cost.flops == _round(_pair(family))[0].flops


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark", "mtp"])
def test_heads_are_shared_out_too(kind: str) -> None:
    pair = _pair("llama", kind)
    alone, _ = _round(pair, 2)
    shared, _ = _round(pair, 2, tensor=2)
    draft, mine = alone.stage("propose", "observe"), shared.stage("propose", "observe")
    assert draft.flops > 0
    # All but products of what every device needs whole: the fused taps, the Markov part's rows.
    assert 0.5 * draft.flops <= mine.flops < 0.85 * draft.flops
    assert mine.exchanges > 0


def test_what_does_not_divide_is_refused(llama: Pair) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        _round(llama, tensor=4)  # two key-value heads
    with pytest.raises(ConfigError, match=r"Plan\.batches"):
        _round(llama, batch=3, data=2)


@pytest.mark.devices8
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", {}),
        ("llama", {"tensor": 2}),
        ("qwen3_moe", {"expert": 8}),
        ("deepseek_v3", {"tensor": 4}),
    ],
)
def test_the_compiled_round(family: str, mesh: dict[str, int]) -> None:
    """What each device is given and needs, how often sums go round: as XLA partitions the round."""
    pair = _pair(family, loop="unroll")
    cost, memory = _round(pair, **mesh)
    layout = Layout.of(MeshConfig(**mesh), SERVED)
    target = dataclasses.replace(pair.target, layout=layout)
    decoder = Decoder(target, NullHead(), 0, target.info.stop_ids, layout=layout)
    plain = dataclasses.replace(decoder, layout=None)
    state = jax.eval_shape(lambda: init_state(plain, 4, 64, "float32"))
    weights = Weights(target=shapes(pair.target_specs, "float32"), head=())
    places = (
        Weights(target=layout.weights(pair.target_specs), head=()),
        shardings(layout, state, 4),
    )
    run = jax.jit(partial(one_round, decoder), in_shardings=places, donate_argnums=1)
    compiled = run.lower(weights, state).compile()
    analysis = compiled.memory_analysis()
    given = memory.target + memory.state
    assert analysis.argument_size_in_bytes == pytest.approx(given, rel=0.01)
    assert analysis.temp_size_in_bytes <= cost.temporaries
    lines = [line for line in compiled.as_text().splitlines() if "/forward/" in line]
    sums = [line for line in lines if re.search(r" all-reduce(-start)?\(", line)]
    assert len(sums) == cost.stage("forward").exchanges
