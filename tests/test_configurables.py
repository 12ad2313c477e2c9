"""The registry of configurables, and what it says of the shipped ones."""

import dataclasses

import pytest

from specjax import bindings, configurables
from specjax.config import register, table
from specjax.core.errors import ConfigError
from specjax.core.fieldtypes import coerce

SHIPPED = sorted(configurables.REGISTRY)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        width: how wide,
            in tokens.
        dtype (str): of what; "a: b" is no entry.

    More text: not an entry.
    """

    width: int = 4
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Whole:
    """Says nothing of its fields."""

    size: int
    part: Part = Part(8)
    taps: tuple[int, ...] | None = (1, 2)
    names: dict[str, int] = dataclasses.field(default_factory=dict)
    hidden: int = dataclasses.field(default=0, init=False)


def entry(data: str, *rest: int, steps: int = 10, **more: int) -> None:
    """Stand for a script.

    Args:
      data: the file.
      steps: how many.

    Returns:
      Nothing.
    """


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"Part": Part, "Whole": Whole, "entry": entry}
    monkeypatch.setattr(configurables, "REGISTRY", names)


@pytest.mark.usefixtures("registry")
def test_table() -> None:
    rows = {f"{row.configurable}.{row.name}": row for row in table()}
    assert [row.doc for row in table(["Part"])] == [
        "how wide, in tokens.",
        'of what; "a: b" is no entry.',
    ]
    assert [row.name for row in table(["entry"])] == ["data", "steps"]
    assert rows["entry.data"].default is configurables.REQUIRED
    assert rows["entry.steps"].doc == "how many."
    assert [(row.name, row.type, row.default) for row in table(["Whole"])] == [
        ("size", "int", configurables.REQUIRED),
        ("part", "Part", Part(8)),
        ("taps", "tuple[int, ...] | None", (1, 2)),
        ("names", "dict[str, int]", {}),
    ]


@pytest.mark.usefixtures("registry")
def test_nested_name() -> None:
    assert configurables.nested_name(Part) == "Part"
    assert configurables.nested_name(Part | None) is None
    assert configurables.nested_name(int) is None


@pytest.mark.usefixtures("registry")
def test_register() -> None:
    register("Late", "specjax.core.errors:nearest")
    register("Late", "specjax.core.errors:nearest")  # the same again is no conflict
    assert list(configurables.parameters("Late")) == ["name", "valid"]
    with pytest.raises(ConfigError, match="the configurable name 'Whole' is taken"):
        register("Whole", Part)
    with pytest.raises(ConfigError, match="here: no configurable named 'Hole'; did you mean 'W"):
        configurables.lookup("Hole", "here: ")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurables_keep_the_rules(name: str) -> None:
    target = configurables.lookup(name)
    if isinstance(target, type):
        assert dataclasses.is_dataclass(target)
        assert target.__dataclass_params__.frozen
    for row in table([name]):
        assert row.doc, f"{name}.{row.name} has no line in the docstring"
        if row.default is configurables.REQUIRED:
            continue
        fitting = coerce(row.default, row.annotation)
        assert type(fitting) is type(row.default), f"{name}.{row.name}"
        if configurables.nested_name(row.annotation) is None:
            assert bindings._literal(row.default)
