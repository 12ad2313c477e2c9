"""Check a value from outside against a type annotation, and bring it to exactly that type."""

import dataclasses
import math
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin


class MismatchError(Exception):
    """The value does not fit the annotation; the caller says where it came from."""


def is_union(annotation: Any) -> bool:
    """Whether the annotation is `A | B`, `Optional[A]` or `Union[A, B]`."""
    return get_origin(annotation) in (Union, types.UnionType)


def type_name(annotation: Any) -> str:
    """The annotation as a user reads it: `int`, `float | None`, `tuple[int, ...]`."""
    if annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if is_union(annotation):
        return " | ".join(type_name(part) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " | ".join(repr(value) for value in get_args(annotation))
    if get_origin(annotation) is not None:
        parts = ", ".join(type_name(part) for part in get_args(annotation))
        return f"{get_origin(annotation).__name__}[{parts}]"
    return getattr(annotation, "__name__", str(annotation))


def coerce(value: Any, annotation: Any) -> Any:
    """The value as the annotation wants it.

    An int serves as a float and a list as a tuple; a bool never serves as a number, and numbers
    are finite (a configuration is saved as literals, which have no infinity).

    Args:
      value: what was given.
      annotation: a type as written on a dataclass field: int, float, bool, str, None, Any,
        unions, Literal, tuple, dict, or a class.

    Raises:
      MismatchError: if the value does not fit.
      TypeError: if the annotation is of a kind that a configuration cannot hold.
    """
    if annotation is Any:
        return value
    if is_union(annotation):
        return _coerce_union(value, get_args(annotation))
    origin = get_origin(annotation)
    if origin is Literal:
        # Compare types too: True == 1, and a bool is not the number that a Literal lists.
        if any(value == option and type(value) is type(option) for option in get_args(annotation)):
            return value
        raise MismatchError
    if annotation is tuple or origin is tuple:
        return _coerce_tuple(value, get_args(annotation))
    if annotation is dict or origin is dict:
        return _coerce_dict(value, get_args(annotation))
    if annotation is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise MismatchError
    if annotation in (int, bool, str, type(None)):
        if type(value) is annotation:
            return value
        raise MismatchError
    if dataclasses.is_dataclass(annotation):
        if isinstance(value, typing.cast(type, annotation)):
            return value
        raise MismatchError
    raise TypeError(f"a configuration cannot hold {type_name(annotation)}")


def _coerce_union(value: Any, options: tuple[Any, ...]) -> Any:
    # The option of the value's own type goes first, so that 3 stays an int in `float | int`.
    for option in sorted(options, key=lambda option: type(value) is not option):
        try:
            return coerce(value, option)
        except MismatchError:
            continue
    raise MismatchError


def _coerce_tuple(value: Any, items: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise MismatchError
    if not items:
        return tuple(value)
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(value)
    if len(items) != len(value):
        raise MismatchError
    return tuple(coerce(part, item) for part, item in zip(value, items, strict=True))


def _coerce_dict(value: Any, items: tuple[Any, ...]) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise MismatchError
    key_type, item_type = items or (Any, Any)
    return {coerce(key, key_type): coerce(item, item_type) for key, item in value.items()}
