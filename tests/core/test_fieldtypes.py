import dataclasses
from typing import Any, Literal, Optional, Union

import pytest

from specjax.core.fieldtypes import MismatchError, coerce, type_name


@dataclasses.dataclass(frozen=True)
class Thing:
    x: int = 1


@pytest.mark.parametrize(
    ("value", "annotation", "want"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (3, float | int, 3),
        (3, float | str, 3.0),
        (None, int | None, None),
        (None, Optional[int], None),  # noqa: UP045
        ("a", Union[int, str], "a"),  # noqa: UP007
        ([1, [2.0, 3]], tuple[int, tuple[float, ...]], (1, (2.0, 3.0))),
        ([], tuple[int, ...], ()),
        ([1, "a"], tuple, (1, "a")),
        ({"a": [1]}, dict[str, tuple[int, ...]], {"a": (1,)}),
        ({1: 2}, dict, {1: 2}),
        ("b", Literal["a", "b"], "b"),
        (Thing(), Thing, Thing()),
        ([1], Any, [1]),
    ],
)
def test_fits(value: Any, annotation: Any, want: Any) -> None:
    got = coerce(value, annotation)
    assert got == want
    assert type(got) is type(want)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, int),
        (True, float),
        (1, bool),
        (1.0, int),
        ("1", int),
        (None, str),
        (float("nan"), float),
        (float("-inf"), float),
        ("ab", tuple[str, ...]),
        ([1, 2, 3], tuple[int, int]),
        ([True], tuple[int, ...]),
        ({"a": "b"}, dict[str, int]),
        ([1], dict[str, int]),
        (True, Literal[1, 2]),
        ("c", Literal["a", "b"]),
        (True, int | None),
        (1, Thing),
    ],
)
def test_refused(value: Any, annotation: Any) -> None:
    with pytest.raises(MismatchError):
        coerce(value, annotation)


def test_annotation_of_another_kind_is_our_mistake() -> None:
    with pytest.raises(TypeError, match="cannot hold set"):
        coerce(1, set)


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        (int, "int"),
        (str | None, "str | None"),
        (tuple[int, ...], "tuple[int, ...]"),
        (dict[str, float], "dict[str, float]"),
        (Literal["a", 1], "'a' | 1"),
        (Any, "Any"),
        (Thing, "Thing"),
    ],
)
def test_type_name(annotation: Any, name: str) -> None:
    assert type_name(annotation) == name
