from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import doctor
from specjax.selfcheck import operations
from specjax.selfcheck.operations import difference, run
from specjax.selfcheck.parity import parity


def test_differences() -> None:
    a = {"x": np.array([1.0, 2.0]), "n": np.array([3, 4])}
    assert difference(a, a) == 0
    assert difference({**a, "x": np.array([1.0, 2.2])}, a) == pytest.approx(0.1)
    assert difference({**a, "n": np.array([3, 5])}, a) == 1
    assert difference({**a, "x": np.array([1.0, np.nan])}, a) == float("inf")
    assert difference({**a, "x": np.array([1.0])}, a) == float("inf")


def test_what_a_platform_lacks_is_said() -> None:
    def broken() -> Any:
        raise NotImplementedError("no such kernel\nand more")

    check = run("sort", 0.0, broken, lambda: np.zeros(1))
    assert not check.right and check.said == "no such kernel"


def test_operations_of_this_device() -> None:
    found = operations.operations(jax.devices()[0])
    assert len(found) >= 9 and all(check.right for check in found), found


def test_a_wrong_operation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = jnp.cumsum
    monkeypatch.setattr(jnp, "cumsum", lambda x, axis: right(x, axis=axis) * 1.001)
    wrong = [c.name for c in operations.operations(jax.devices()[0]) if not c.right]
    assert wrong == ["running sum"]


def test_families_and_heads_agree_with_themselves() -> None:
    seen = []
    found = parity(jax.devices()[0], ("llama",), ("eagle3",), seen.append)
    assert [check.name for check in found] == [
        "round: llama",
        "round: eagle3 on llama",
        "training: eagle3 on llama",
    ]
    assert seen == found and all(check.right for check in found), found


def test_parity_finds_a_device_that_computes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes from the device is off by a part in a thousand."""
    get = jax.device_get

    def off(tree: Any) -> Any:
        return jax.tree.map(lambda x: x * 1.001 if x.dtype == np.float32 else x, get(tree))

    monkeypatch.setattr(jax, "device_get", off)
    (check,) = parity(jax.devices()[0], ("llama",), ())
    assert not check.right and 0.0009 < check.error < 0.0011


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert "platform cpu" in shown and "all is well" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert doctor.main(["--party"]) == 2
    assert "not --party" in capsys.readouterr().err
