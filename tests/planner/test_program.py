"""Flattened programs: what is inlined, decided and left out."""

import functools

import jax
import jax.numpy as jnp
import pytest

from specjax.planner.program import Program, flatten


def names(program: Program) -> list[str]:
    return [op.name for op in program.ops]


def flat(function, *args, platform: str = "cuda") -> Program:
    return flatten(jax.make_jaxpr(function)(*args), platform)


X = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def test_calls_are_inlined() -> None:
    @jax.jit
    def inner(x):
        return jax.nn.relu(jnp.sin(x))  # a custom derivative, within a jit

    assert names(flat(lambda x: jax.checkpoint(inner)(x), X)) == ["sin", "max"]


def test_what_nobody_uses_is_left_out() -> None:
    def function(x):
        jnp.exp(x)
        return jnp.sin(x)

    assert names(flat(function, X)) == ["sin"]


@pytest.mark.parametrize(("temperature", "taken"), [(0.0, "sin"), (0.5, "cos")])
def test_branches_on_what_is_known_are_decided(temperature: float, taken: str) -> None:
    def function(x):
        rows = jnp.full((5,), temperature)
        return jax.lax.cond(jnp.any(rows > 0), jnp.cos, jnp.sin, x)

    found = names(flat(function, X))
    assert taken in found
    assert not {"sin", "cos", "cond"} - {taken} & set(found)


def test_other_branches_stay() -> None:
    program = flat(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x), X)
    (cond,) = [op for op in program.ops if op.name == "cond"]
    assert sorted(names(body) for body in cond.bodies) == [["cos"], ["sin"]]


@pytest.mark.parametrize(
    ("platform", "taken"), [("cpu", "sin"), ("cuda", "cos"), ("rocm", "cos"), ("tpu", "tan")]
)
def test_the_branch_of_the_platform_is_taken(platform: str, taken: str) -> None:
    def function(x):
        return jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.tan, default=jnp.cos)

    found = names(flat(function, X, platform=platform))
    assert [name for name in found if name in ("sin", "cos", "tan")] == [taken]


def test_stages_are_the_named_scopes() -> None:
    def function(x):
        with jax.named_scope("forward"), jax.named_scope("layer0"):
            x = jax.jit(jnp.sin)(x)
        return jnp.cos(x)

    found = [(op.name, op.stage) for op in flat(function, X).ops]
    assert found == [("sin", "forward"), ("cos", "")]


def test_loops_without_a_number_of_turns_are_refused() -> None:
    loop = functools.partial(jax.lax.while_loop, lambda x: x[0, 0] > 0, lambda x: x - 1)
    with pytest.raises(ValueError, match="turns"):
        flat(loop, X)
