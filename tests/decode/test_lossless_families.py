"""Every family under a drafter that lies: greedy texts token for token, sampled ones by law.

Rings wrap, states and latent caches see rejected drafts in every round, stop tokens stand inside
blocks, lanes are refilled. Acceptances are held against a replay in plain Python.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decode import Engine, EngineConfig, Request
from tests.decode.adversary import VOCAB, WINDOW, Adversary, Gambler, Traps, tiny, trap
from tests.decode.laws import BEHIND, DRAFTS, SAID, SYMBOLS, check_law, sampled_texts

K, NEW = 4, 44
LENGTHS = (1, 4 * WINDOW + 1, 5, 21, 12, 2)  # the last two wait for a lane
BASE = EngineConfig(num_speculative_tokens=K, concurrency=4, capacity=80, prefill_chunk=16)
FAMILIES = (
    ("llama", "unroll"),
    ("qwen3_moe", "unroll"),
    ("qwen3_5", "unroll"),
    ("gemma4", "unroll"),
    ("gemma4_e", "scan"),
    ("deepseek_v3", "unroll"),
    ("minimax_m2", "scan"),
    pytest.param("qwen3", "unroll", marks=pytest.mark.slow),
    pytest.param("gemma4_moe", "unroll", marks=pytest.mark.slow),
    pytest.param("qwen3_5", "scan", marks=pytest.mark.slow),
    pytest.param("gemma4_e", "unroll", marks=pytest.mark.slow),
)


def some_prompts() -> list[tuple[int, ...]]:
    """Six prompts, told apart by their first token."""
    rng = np.random.default_rng(1)
    return [(i, *map(int, rng.integers(8, VOCAB, n - 1))) for i, n in enumerate(LENGTHS)]


def choose_stop(answers: list[tuple[int, ...]]) -> int:
    """Return the token that ends the fewest texts, at least one of them in its second third."""
    middles = {t for a in answers for t in a[12:30] if a.index(t) >= 12}
    return min(sorted(middles), key=lambda t: sum(t in a for a in answers))


def replay(length: int, text: tuple[int, ...], drafts: np.ndarray, stop: int) -> dict[str, Any]:
    """What a lossless engine counts on the way to `text`, which ends at a stop or the budget.

    Args:
        length: of the prompt.
        text: the answer.
        drafts: `[S, K]` by the number of tokens that are there already.
        stop: the stop token.
    """
    drafted, accepted = np.zeros(K, int), np.zeros(K, int)
    rounds = stops_inside = 0
    said = 1  # by the prompt's pass
    while said < len(text):
        width = min(K, NEW - said - 1)
        # A draft behind the end of the text has no chance, whatever it says.
        true = [*text[said : said + width]]
        hits = [int(d) == t for d, t in zip(drafts[length + said], true, strict=False)]
        kept = hits.index(False) if False in hits else len(hits)
        cut = kept and text[said + kept - 1] == stop
        drafted[: kept if cut else width] += 1
        accepted[:kept] += 1
        rounds += 1
        stops_inside += bool(cut)
        said += kept if cut else kept + 1
    counts = {"rounds": rounds, "drafted": tuple(drafted), "accepted": tuple(accepted)}
    return counts | {"stops_inside": stops_inside}


SEEDS = {"qwen3": 9}
"""Of weights whose texts are no loops of a few tokens, where the usual ones give such."""


@pytest.mark.parametrize(("name", "loop"), FAMILIES)
def test_texts_are_the_baselines(name: str, loop: str) -> None:
    target, params = tiny(name, loop, SEEDS.get(name, 3))
    prompts = some_prompts()
    requests = [Request(p, NEW) for p in prompts]
    baseline = [r.token_ids for r in Engine(target, params, config=BASE).generate(requests)]
    for text in baseline:  # neither a loop of a few tokens nor a function of the last one alone
        assert len(set(text)) >= 8
        assert len(set(itertools.pairwise(text))) > len(set(text))

    script = np.zeros((len(prompts), BASE.capacity), np.int32)
    for row, prompt, text in zip(script, prompts, baseline, strict=True):
        row[: len(prompt) + NEW] = prompt + text
    drafts = trap(script, K, np.random.default_rng(2))
    stop = choose_stop(baseline)
    wanted = [t[: t.index(stop) + 1] if stop in t else t for t in baseline]
    assert sum(len(text) == NEW for text in wanted) >= 2
    for n, text in enumerate(wanted):
        if len(text) < NEW:  # the truth wherever the stop token is in reach, and beyond it
            end = len(prompts[n]) + len(text)
            for size in range(max(end - K, 0), end):
                drafts[n, size] = script[n, size : size + K]
            # No leap from just out of reach: the stop token would be the target's own.
            drafts[n, end - K - 1, 0] = (script[n, end - K - 1] + 1) % VOCAB

    traps = Traps(first=jnp.arange(len(prompts)), drafts=jnp.asarray(drafts))
    engine = Engine(target, params, Adversary(), traps, BASE, stop_ids=(stop,))
    results = engine.generate(requests)
    assert [r.token_ids for r in results] == wanted
    stops_inside = 0
    for n, (result, text) in enumerate(zip(results, wanted, strict=True)):
        assert result.finish_reason == ("stop" if text[-1] == stop else "length")
        counts = replay(len(prompts[n]), text, drafts[n], stop)
        stops_inside += counts.pop("stops_inside")
        assert {key: getattr(result, key) for key in counts} == counts
    assert stops_inside
    share = np.sum([r.accepted for r in results]) / np.sum([r.drafted for r in results])
    assert 0.2 < share < 0.8


@pytest.mark.parametrize(
    ("name", "changes", "rows", "certain"),
    [
        ("qwen3_5", {}, 1000, False),
        ("gemma4", {"sliding_window": 4}, 1000, False),
        pytest.param("qwen3_5", {}, 10_000, True, marks=pytest.mark.slow),
        pytest.param("gemma4", {"sliding_window": 4}, 10_000, True, marks=pytest.mark.slow),
    ],
)
def test_samples_follow_the_targets_law(
    name: str, changes: dict[str, int], rows: int, certain: bool
) -> None:
    """Drafts from laws that know nothing of the text, or their argmax as a point mass."""
    target, params = tiny(name, vocab_size=SYMBOLS, **changes)
    prompt = np.random.default_rng(3).integers(0, SYMBOLS, BEHIND, dtype=np.int32)
    drawn_from = np.random.default_rng(4).normal(0, 1.4, (BEHIND + SAID + DRAFTS, SYMBOLS))
    texts, share = sampled_texts(
        target,
        params,
        prompt,
        rows,
        Gambler(certain),
        jnp.asarray(drawn_from, jnp.float32),
        EngineConfig(num_speculative_tokens=DRAFTS),
    )
    assert (0.02 if certain else 0.2) < share < 0.8
    check_law(target, params, texts)
