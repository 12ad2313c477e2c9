"""Plans: what is derived from traced rounds, and whole plans of catalogue pairs."""

from pathlib import Path

import pytest

from specjax.core.errors import CheckpointError, ConfigError, PairingError
from specjax.core.mesh_config import MeshConfig
from specjax.planner import report
from specjax.planner.acceptance import Acceptance
from specjax.planner.chips import CHIPS
from specjax.planner.config import PlanConfig
from specjax.planner.cost import Cost
from specjax.planner.pair import Memory, find_pair
from specjax.planner.plan import Plan, Point, make, traced_drafts
from specjax.targets import catalog
from specjax.targets.config import TargetConfig

GB = 1e9


def _made_up(acceptance: Acceptance | None, **changes) -> Plan:
    """Rounds whose seconds and bytes are known: (1 + k / 10) * (1 + lanes * context / 2^20) s."""
    config = PlanConfig(batches=(1, 64), contexts=(1024, 4096, 16384), chip="h100", **changes)
    points = [
        Point(
            k,
            batch,
            context,
            Cost((), temporaries=batch * GB / 64),
            Memory(10 * GB, 2 * GB, batch * context * GB / 2**17),
            (1 + k / 10) * (1 + batch * context / 2**20),
        )
        for k in (0, 2, 4)
        for batch in config.batches
        for context in (1024, 16384)
    ]
    pair = find_pair("SmolLM2-135M-Instruct", "ngram", TargetConfig())
    return Plan(config, pair, CHIPS["h100"], 4, tuple(points), acceptance)


def test_speedups_and_the_best_setting() -> None:
    plan = _made_up(Acceptance((0.5, 0.05), "given"))
    # Rounds of 3 are interpolated; seconds of the context cancel.
    assert plan.break_even(3, 64, 4096) == pytest.approx(1.3)
    assert plan.speedup(1, 1, 1024) == pytest.approx(1.5 / 1.1)
    assert plan.best(1, 1024) == (1, pytest.approx(1.5 / 1.1))
    assert _made_up(Acceptance((0.01,), "given")).best(64, 1024) == (0, 1.0)


def test_contexts_between_are_interpolated() -> None:
    profile = _made_up(None).profile(64, 4096)
    assert profile.round_seconds(0) == pytest.approx(1 + 64 * 4096 / 2**20)


def test_what_fits() -> None:
    plan = _made_up(None)
    assert plan.room == pytest.approx(72 * GB)
    lane = 1024 / 2**17 + 1 / 64
    assert plan.needed(64, 1024) == pytest.approx((12 + 64 * lane) * GB)
    most = plan.most_lanes(1024)
    assert most == int(60 / lane)
    assert plan.needed(most, 1024) <= plan.room < plan.needed(most + 1, 1024)
    assert _made_up(None, usable=0.1).most_lanes(1024) == 0
    by_four = _made_up(None, mesh=MeshConfig(data=4)).most_lanes(1024)
    assert by_four == most // 4 * 4


def test_verdicts() -> None:
    pays = " ".join(report.verdict(_made_up(Acceptance((0.5, 0.05), "given"))))
    assert "Best: 1.36 times" in pays
    assert "Eval.num_speculative_tokens=1" in pays
    never = " ".join(report.verdict(_made_up(Acceptance((0.01,), "given"))))
    assert "pays nowhere" in never
    unknown = " ".join(report.verdict(_made_up(None)))
    assert "--acceptance" in unknown
    assert "links" not in unknown
    assert "Plan.link_gb" in " ".join(report.verdict(_made_up(None, mesh=MeshConfig(data=16))))
    small = _made_up(Acceptance((0.5,), "given"), usable=0.1)
    assert "take more devices" in " ".join(report.verdict(small))


@pytest.mark.parametrize(("most", "drafts"), [(1, [1]), (3, [1, 2, 3]), (7, [1, 3, 5, 7])])
def test_drafts_that_are_traced(most: int, drafts: list[int]) -> None:
    assert traced_drafts(most) == drafts


def _config(target: str, head: str, **changes) -> PlanConfig:
    given = {"batches": (1,), "contexts": (2048,), "most": 1, "chip": "mi355x", **changes}
    return PlanConfig(target=target, head=head, **given)


def test_kimi_on_eight_devices(tmp_path: Path) -> None:
    """The trillion parameters of Kimi-K2.5 are planned on shapes, a head of it by its kind."""
    plan = make(
        _config("kimi-k2.5", "dflash", mesh=MeshConfig(tensor=8), acceptance="0.8", batches=(1, 2))
    )
    assert plan.pair.head_name == "Kimi-K2.5-DFlash"
    point = plan.points[0]
    # 1,026 billion int4 weights with a scale per 32 of them, and what is left unquantised.
    assert 8 * point.memory.target == pytest.approx(605 * GB, rel=0.02)
    verify = point.cost.stage("forward")
    assert verify.exchanges == 2 * 61 + 1
    # The 31.7 billion parameters that a token meets, and its attention; each device does the
    # latent projections for itself, 61 times 7168 x (1536 + 576), and the routers' 7168 x 384.
    alone = 2 * 61 * 7168 * (1536 + 576 + 384)
    attention = 61 * 2 * 2 * 64 * 576 * 2049
    assert 8 * (verify.flops - alone) + alone == pytest.approx(2 * 31.7e9 + attention, rel=0.02)
    assert plan.speedup(1, 1, 2048) > 1
    report.write(plan, tmp_path)
    assert (tmp_path / report.FIGURE).read_bytes().startswith(b"\x89PNG")


def test_a_round_reads_the_weights_and_the_cache_once() -> None:
    """Qwen3-8B at one lane: everything but the embedding, and keys and values of 2,048 tokens."""
    plan = make(_config("qwen3-8b", "qwen3-8b-speculator.eagle3"))
    base = next(point for point in plan.points if point.drafts == 0)
    weights = (8.19073536e9 - 151936 * 4096) * 2
    cache = 36 * 2 * 8 * 128 * (2048 + 1) * 2
    assert base.cost.bytes == pytest.approx(weights + cache, rel=0.01)
    products = weights + 36 * 2 * 2 * 32 * 128 * (2048 + 2)
    assert base.cost.flops == pytest.approx(products, rel=0.001)


def test_names_that_do_not_exist() -> None:
    for target, head, error, said in (
        ("kimi", "ngram", CheckpointError, "no target 'kimi'"),
        ("qwen3-8b", "eagle", CheckpointError, "no head 'eagle'"),
        ("qwen3-8b", "mtp", PairingError, "no mtp head for Qwen3-8B"),
        ("qwen3-4b", "Qwen3-8B-DFlash-b16", PairingError, "Qwen3-8B-DFlash-b16"),
    ):
        with pytest.raises(error, match=said):
            make(_config(target, head))


def test_what_cannot_be_meant() -> None:
    with pytest.raises(ConfigError, match="at most 40960"):
        make(_config("qwen3-8b", "ngram", contexts=(2048, 65536)))
    with pytest.raises(ConfigError, match="drafts at most 7"):
        make(_config("qwen3-8b", "Qwen3-8B-speculator.dflash", most=8))
    for wrong in ({"batches": ()}, {"batches": (4, 2)}, {"contexts": (8,)}, {"usable": 0.0}):
        with pytest.raises(ConfigError, match=f"Plan.{next(iter(wrong))}"):
            PlanConfig(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", catalog.names())
def test_every_target_of_the_catalogue(name: str) -> None:
    devices = {"DeepSeek-V3": 8, "Kimi-K2.5": 8, "MiniMax-M2.5": 8}.get(name, 1)
    plan = make(_config(name, "ngram", mesh=MeshConfig(tensor=devices), batches=(1, 4)))
    assert all(point.seconds > 0 for point in plan.points)
