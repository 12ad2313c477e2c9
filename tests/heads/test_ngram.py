"""Prompt lookup against a plain search in Python, and in the engine."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.core.errors import ConfigError
from specjax.decode import Engine, EngineConfig, Request
from specjax.heads.base import DraftContext
from specjax.heads.ngram import NgramHead
from specjax.heads.plain_config import NgramConfig
from specjax.layers.sampling import Sampling
from tests.decode.adversary import tiny

SIZE = 24


def looked_up(text: list[int], config: NgramConfig, num: int) -> list[int] | None:
    """What stood behind the newest of the longest matches, going round at the end."""
    for n in range(config.longest, config.shortest - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if len(text) >= n and text[end - n + 1 : end + 1] == text[-n:]:
                behind = text[end + 1 :]
                return [behind[k % len(behind)] for k in range(num)]
    return None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=SIZE), min_size=3, max_size=3),
    st.sampled_from([(1, 3), (2, 3), (1, 1), (3, 4)]),
)
def test_finds_what_a_plain_search_finds(texts: list[list[int]], limits: tuple[int, int]) -> None:
    config, num = NgramConfig(longest=limits[1], shortest=limits[0]), 5
    padded = np.asarray([text + [7] * (SIZE - len(text)) for text in texts], np.int32)
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    context = DraftContext(
        anchor=jnp.asarray([text[-1] for text in texts]),
        position=lengths - 1,
        tokens=jnp.asarray(padded),
        lengths=lengths,
        sampling=Sampling.of(3),
    )
    found = NgramHead(config).propose((), None, (), context, num)
    for b, text in enumerate(texts):
        wanted = looked_up(text, config, num)
        assert int(found.count[b]) == (num if wanted else 0)
        if wanted:
            assert np.asarray(found.tokens[b]).tolist() == wanted


def test_decodes_losslessly_and_counts_only_what_it_drafted() -> None:
    """Rounds without a match verify nothing and count nothing as drafted (F59)."""
    target, params = tiny("llama")
    rng = np.random.default_rng(0)
    phrase = rng.integers(3, 60, 5).tolist()
    prompts = [phrase * 3, list(range(10, 25)), [7]]
    requests = [Request(prompt_ids=tuple(ids), max_new_tokens=40) for ids in prompts]
    plain = Engine(target, params).generate(requests)
    config = EngineConfig(num_speculative_tokens=4, concurrency=2)
    found = Engine(target, params, NgramHead(), (), config).generate(requests)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    drafted = sum(sum(r.drafted) for r in found)
    rounds = sum(r.rounds for r in found)
    assert 0 < drafted < 4 * rounds  # some rounds had nothing to say
    assert 0 < sum(sum(r.accepted) for r in found) < drafted


def test_refuses_lengths_that_cannot_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"Ngram\.shortest 4 and Ngram\.longest 3"):
        NgramConfig(shortest=4)
