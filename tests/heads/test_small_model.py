"""A small model as the drafter: in step with the text, lossless, refused on another vocabulary."""

import numpy as np
import pytest

from specjax.core.errors import PairingError
from specjax.decode import Engine, EngineConfig, Request
from specjax.heads.small_model import SmallModelHead
from tests.decode.adversary import tiny

NEW = 30


def requests(temperature: float = 0.0) -> list[Request]:
    rng = np.random.default_rng(1)
    return [
        Request(
            prompt_ids=tuple(rng.integers(3, 60, n).tolist()),
            max_new_tokens=NEW,
            temperature=temperature,
        )
        for n in (5, 18, 1)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_lossless_with_another_family_as_the_drafter(family: str) -> None:
    target, params = tiny("qwen3")
    model, small = tiny(family, seed=5)
    plain = Engine(target, params).generate(requests())
    head = SmallModelHead.for_target(target.info, model)
    config = EngineConfig(num_speculative_tokens=3, concurrency=2)
    found = Engine(target, params, head, small, config).generate(requests())
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert sum(sum(r.accepted) for r in found) < sum(sum(r.drafted) for r in found)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_target_as_its_own_drafter_is_always_right(family: str) -> None:
    """Its cache is in step with the text: one slip and drafts would be refused."""
    target, params = tiny(family)
    config = EngineConfig(num_speculative_tokens=3, concurrency=3)
    head = SmallModelHead(target)
    found = Engine(target, params, head, params, config).generate(requests())
    for result in found:
        assert result.accepted == result.drafted and result.rounds == -(-(NEW - 1) // 4)


def test_outgrown_drafter_stops_drafting() -> None:
    """F58: behind the drafter's length plain decoding goes on, and nothing counts as drafted."""
    target, params = tiny("llama")
    model, small = tiny("llama", max_position_embeddings=20)
    (request,) = requests()[:1]
    config = EngineConfig(num_speculative_tokens=3)
    head = SmallModelHead(model)
    (found,) = Engine(target, params, head, small, config).generate([request])
    (plain,) = Engine(target, params).generate([request])
    assert found.token_ids == plain.token_ids
    assert found.accepted == found.drafted  # the same weights: right while it may draft
    assert found.rounds > (NEW - 1) // 4 + 10


def test_refuses_another_vocabulary() -> None:
    target, _ = tiny("llama")
    model, _ = tiny("llama", vocab_size=60)
    with pytest.raises(PairingError, match="the small model has 60 tokens, the target 64"):
        SmallModelHead.for_target(target.info, model)
