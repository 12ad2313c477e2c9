import pytest

from specjax.core import errors


def test_nearest() -> None:
    assert errors.nearest("repeat", ["repeats", "target"]) == "; did you mean 'repeats'?"
    assert errors.nearest("EVAL", ["Eval", "Engine"]) == "; did you mean 'Eval'?"
    assert errors.nearest("zzz", ["repeats", "target"]) == ""
    assert errors.nearest("x", []) == ""


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_every_error_is_a_users_mistake(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.SpecJaxError)
