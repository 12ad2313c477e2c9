import pytest

from specjax.selfcheck.environment import Found, look, problems

BASE = {"jax": "0.10.2", "jaxlib": "0.10.2"}
ROCM = {"jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.10.2"}


def test_this_machine() -> None:
    found = look()
    assert found.versions["jax"] and found.platform == "cpu"
    assert found.variables["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    "found",
    [
        Found(BASE, "cpu"),
        Found(BASE | ROCM, "rocm", ("rocm",)),
        Found(BASE | {"jax-cuda12-plugin": "0.10.2"}, "cuda", ("cuda",)),
    ],
)
def test_nothing_is_wrong(found: Found) -> None:
    assert problems(found) == []


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        (Found({"jax": "0.12.0", "jaxlib": "0.10.2"}, "cpu"), "pip install jaxlib==0.12.0"),
        (
            Found({"jax": "0.12.0", "jaxlib": "0.12.0"} | ROCM, "rocm", ("rocm",)),
            "jax-rocm7-plugin 0.10.2 belongs to another jax than 0.12.0",
        ),
        (Found(BASE, "cpu", ("rocm",)), r"pip install 'specjax\[rocm\]'"),
        (Found(BASE | ROCM, "cpu"), "its driver is not loaded"),
        (Found(BASE | ROCM, "cpu", ("rocm",)), "groups render and video"),
        (
            Found(BASE | ROCM, "cpu", ("rocm",), {"JAX_PLATFORMS": "cpu"}),
            "JAX_PLATFORMS=cpu keeps jax on the CPU",
        ),
        (
            Found(BASE | ROCM | {"jax-cuda12-plugin": "0.10.2"}, "rocm", ("rocm",)),
            "both installed: keep one",
        ),
    ],
)
def test_each_fault_has_its_advice(found: Found, advice: str) -> None:
    import re

    assert any(re.search(advice, said) for said in problems(found)), problems(found)
