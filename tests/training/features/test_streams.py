from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from specjax import targets
from specjax.core.errors import PairingError
from specjax.core.paths import configs_dir
from specjax.io.hf import read_json
from specjax.targets.base import Target
from specjax.training.features.streams import bytes_per_token, keep, streams_of, taps_of
from tests.training.toy import HIDDEN

TAPS, READS = (3, 1), (2,)
LENGTHS = np.asarray([9, 5], np.int32)


@pytest.fixture(scope="module")
def out(target: tuple[Target, Any]) -> Any:
    """A pass of the toy target, taps in ascending order."""
    tokens = np.random.default_rng(0).integers(3, 90, (2, 9)).astype(np.int32)
    return target[0].forward(target[1], tokens, LENGTHS, None, tuple(sorted(TAPS)))


def flat(out: Any, target: Target) -> list[np.ndarray]:
    """What a token keeps, stream by stream, put together by hand."""
    ((k, v),) = target.entries(out.update, READS)
    across = [np.asarray(x).transpose(0, 2, 1, 3).reshape(2, 9, -1) for x in (k, v)]
    return [np.asarray(out.taps[0]), np.asarray(out.taps[1]), np.asarray(out.hidden), *across]


def test_bytes_per_token_of_eagle3_on_smollm2() -> None:
    """Four states of 576 numbers: twice as many bytes in bfloat16, half and four scales in fp8."""
    config = read_json(configs_dir() / "targets" / "SmolLM2-135M-Instruct.json")
    streams = streams_of(targets.from_config(config).info, (2, 15, 27), ())
    assert [s.name for s in streams] == ["tap 2", "tap 15", "tap 27", "hidden"]
    assert bytes_per_token(streams, "bfloat16") == 4608
    assert bytes_per_token(streams, "fp8") == 2320


def test_bfloat16_gives_back_what_the_target_gave(out: Any, target: tuple[Target, Any]) -> None:
    streams = streams_of(target[0].info, TAPS, READS)
    assert taps_of(streams) == (1, 3)
    kept = keep(target[0], out, streams, "bfloat16")
    want = np.concatenate([x.astype(ml_dtypes.bfloat16) for x in flat(out, target[0])], -1)
    np.testing.assert_array_equal(np.asarray(kept.states), want)
    hidden, taps, ((k, v),) = jax.device_get(kept.recall(TAPS, READS, "float32"))
    rounded = jax.tree.map(lambda x: np.asarray(x.astype("bfloat16").astype("float32")), out)
    np.testing.assert_array_equal(hidden, rounded.hidden)
    np.testing.assert_array_equal(taps, rounded.taps[::-1])  # in the order the head asks
    want_k, want_v = target[0].entries(rounded.update, READS)[0]
    np.testing.assert_array_equal(k, want_k)
    np.testing.assert_array_equal(v, want_v)


def test_fp8_has_a_scale_per_token_and_stream(out: Any, target: tuple[Target, Any]) -> None:
    streams = streams_of(target[0].info, TAPS, READS)
    kept = jax.device_get(keep(target[0], out, streams, "fp8"))
    parts = flat(out, target[0])
    scales = np.stack([np.abs(part).max(-1) / np.float32(448) for part in parts], -1)
    np.testing.assert_allclose(kept.scales, scales, rtol=1e-6)
    exact = [part / kept.scales[..., i, None] for i, part in enumerate(parts)]
    bits = np.concatenate([x.astype(ml_dtypes.float8_e4m3fn) for x in exact], -1).view(np.uint8)
    np.testing.assert_array_equal(kept.states, bits)
    hidden, taps, _ = jax.device_get(kept.recall(TAPS, READS, "float32"))
    for got, want in ((hidden, parts[2]), (taps[1], parts[0])):
        most = np.abs(want).max(-1, keepdims=True)
        # Three bits of mantissa; below 2**-6 of the scale's unit the steps no longer shrink.
        assert (np.abs(got - want) <= np.abs(want) / 16 + most / 448 / 512).all()
        assert np.abs(got - want).max() > 1e-4 * most.max()


def test_fp8_of_zeros(out: Any, target: tuple[Target, Any]) -> None:
    zeros = jax.tree.map(np.zeros_like, jax.device_get(out))
    kept = keep(target[0], zeros, streams_of(target[0].info, TAPS, ()), "fp8")
    assert not np.asarray(kept.read("hidden", "float32")).any()
    assert kept.read("hidden", "float32").shape == (2, 9, HIDDEN)


@pytest.mark.parametrize(
    ("taps", "reads", "message"),
    [((1, 5), (), r"residual streams 0 to 4, not \[5\]"), ((), (4,), r"in layers \[4\]")],
)
def test_refuses_what_the_target_has_not(
    taps: tuple[int, ...], reads: tuple[int, ...], message: str, target: tuple[Target, Any]
) -> None:
    with pytest.raises(PairingError, match=message):
        streams_of(target[0].info, taps, reads)
