"""The configuration language: what it accepts, and the one line for everything it refuses.

Tests `specjax.config` and `specjax.bindings` together, through `parse`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest

from specjax import configurables
from specjax.config import Config, parse
from specjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Inner:
    """The engine of the tests.

    Attributes:
      width: how wide,
        in tokens.
      dtype (str): of what.
    """

    width: int = 4
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class Outer:
    """The run of the tests."""

    target: str = "demo"
    head: str | None = None
    repeats: int = 3
    temperature: float = 0.0
    verbose: bool = False
    taps: tuple[int, ...] = (2, 4)
    pair: tuple[int, str] = (1, "a")
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    inner: Inner = Inner(width=8)
    other: Inner | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")


@dataclasses.dataclass(frozen=True)
class Needy:
    """Has no default."""

    size: int


def entry(data: str, *, steps: int = 10) -> tuple[str, int]:
    """Stand for a training script.

    Args:
      data: the file.
      steps: how many.
    """
    return data, steps


SHORT = {"target": "Outer.target", "head": "Outer.head"}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"Outer": Outer, "Inner": Inner, "Needy": Needy, "entry": entry}
    monkeypatch.setattr(configurables, "REGISTRY", names)


@pytest.fixture
def write(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "a.gin") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return f"--gin_file={name}"

    return write


def outer(*argv: str) -> Outer:
    config = parse(argv, short=SHORT)
    built = config.build("Outer")
    config.check_all_used()
    return built


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        outer(*argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["Outer.repeats=5"], "repeats", 5),
        (["--gin.Outer.repeats=5"], "repeats", 5),
        (["--gin.Outer.repeats", "5"], "repeats", 5),
        (["Outer.repeats=5", "Outer.repeats=6"], "repeats", 6),
        (["--target", "dir/a-b"], "target", "dir/a-b"),
        (["--target=x=y"], "target", "x=y"),
        (["--target", "it's"], "target", "it's"),
        (["--target", "2024"], "target", "2024"),
        (["--target", "None"], "target", "None"),
        (["--target", "'quoted'"], "target", "quoted"),
        (["--target", "1 2"], "target", "1 2"),
        (["--target="], "target", ""),
        (["--head=eagle3"], "head", "eagle3"),
        (["Outer.head=eagle3"], "head", "eagle3"),
        (["--head=a", "Outer.head=None"], "head", None),
        (["Outer.temperature=1"], "temperature", 1.0),
        (["Outer.temperature=-1e-3"], "temperature", -1e-3),
        (["Outer.verbose=True"], "verbose", True),
        (["Outer.taps=[1,2,3]"], "taps", (1, 2, 3)),
        (["Outer.taps=()"], "taps", ()),
        (["Outer.pair=[7,'b']"], "pair", (7, "b")),
        (["Outer.weights={'kl': 1}"], "weights", {"kl": 1.0}),
    ],
)
def test_command_line(words: list[str], field: str, value: Any) -> None:
    got = getattr(outer(*words), field)
    assert got == value
    assert type(got) is type(value)


def test_defaults_and_nested() -> None:
    assert outer() == Outer()
    # What Inner's bindings leave open comes from the field's own default, not from the class.
    assert outer("Inner.dtype=bfloat16").inner == Inner(width=8, dtype="bfloat16")
    assert parse(["Inner.width=1"]).build("Inner") == Inner(width=1)


def test_references_and_scopes() -> None:
    words = ["Outer.other=@small/Inner()", "small/Inner.width=1", "Inner.dtype=bfloat16"]
    built = outer(*words)
    assert built.other == Inner(width=1, dtype="bfloat16")
    assert built.inner == Inner(width=8, dtype="bfloat16")
    config = parse(["a/Inner.width=1", "a/b/Inner.width=2", "Inner.width=3"])
    assert [config.build("Inner", scope).width for scope in ("", "a", "a/b", "c")] == [3, 1, 2, 3]
    config.check_all_used()


def test_files_includes_macros(write) -> None:
    write("Inner.width = 5\nOuter.repeats = 9\n", "sub/base.gin")
    write("include 'base.gin'\nn = 2  # a macro\nOuter.taps = [%n, 7]\n", "sub/top.gin")
    flag = write("include 'sub/top.gin'\nOuter:\n  repeats = 4\n  temperature = %t\nt = %n\n")
    built = outer(flag)
    assert (built.inner.width, built.repeats, built.temperature) == (5, 4, 2.0)
    assert built.taps == (2, 7)
    assert outer(flag, "n=3").taps == (3, 7)
    assert outer(flag, write("Outer.repeats = 1", "b.gin")).repeats == 1
    assert outer("Outer.repeats=6", flag).repeats == 6  # the command line wins over every file


def test_default_file(write) -> None:
    write("Outer.repeats = 7", "default.gin")
    assert parse([], default="default.gin").build("Outer").repeats == 7
    flag = write("Outer.temperature = 1", "own.gin")
    assert parse([flag], default="default.gin").build("Outer").repeats == 3


def test_functions() -> None:
    config = parse(["entry.steps=3"])
    assert config.build("entry", data="x") == ("x", 3)
    with pytest.raises(ConfigError, match=r"entry\.data has no value"):
        parse([]).build("entry")
    config = parse(["entry.data=y"])
    config.build("entry", data="x")
    with pytest.raises(ConfigError, match=r"entry\.data .* this command decides it by itself"):
        config.check_all_used()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("Outr.repeats=3", "no configurable named 'Outr'; did you mean 'Outer'?"),
        ("outer.repeats=3", "no configurable named 'outer'; did you mean 'Outer'?"),
        ("x.Outer.repeats=3", "no configurable named 'x.Outer'; did you mean 'Outer'?"),
        ("Outer.repeat=3", "Outer has no parameter 'repeat'; did you mean 'repeats'?"),
        ("repeats=3", "nothing uses %repeats; did you mean Outer.repeats?"),
        ("repeat=3", "nothing uses %repeat; did you mean Outer.repeats?"),
        ("Outer.repeats=many", "Outer.repeats takes int, got 'many' on the command line"),
        ("Outer.repeats=", "Outer.repeats takes int, got ''"),
        ("Outer.repeats=True", "Outer.repeats takes int, got True"),
        ("Outer.repeats=3.0", "Outer.repeats takes int, got 3.0"),
        ("Outer.verbose=1", "Outer.verbose takes bool, got 1"),
        ("Outer.verbose=true", "Outer.verbose takes bool, got 'true'"),
        ("Outer.temperature=False", "Outer.temperature takes float, got False"),
        ("Outer.temperature=1e999", "Outer.temperature takes float, got inf"),
        ("Outer.taps=3", "Outer.taps takes tuple[int, ...], got 3"),
        ("Outer.taps=[1,True]", "Outer.taps takes tuple[int, ...], got [1, True]"),
        ("Outer.pair=[1]", "Outer.pair takes tuple[int, str], got [1]"),
        ("Outer.weights={'a':'b'}", "Outer.weights takes dict[str, float]"),
        ("Outer.inner=3", "Outer.inner takes Inner, got 3"),
        ("Inner.dtype=float16", "Inner.dtype takes 'float32' | 'bfloat16', got 'float16'"),
        ("Outer.repeats=0", "Outer: repeats must be at least 1, got 0"),
        ("Outer.repeats=%n", "Outer.repeats on the command line: no macro %n"),
        ("n=%n Outer.repeats=%n", "the macro %n is defined by itself"),
        ("n=2 Outer.target=%n", "Outer.target takes str, got 2"),
        ("Outer.other=@Iner()", "no configurable named 'Iner'; did you mean 'Inner'?"),
        ("Outer.other=@Inner", "@Inner needs parentheses"),
        ("Outer.repeats=@Inner()", "Outer.repeats takes int, got Inner(width=4"),
        ("Outer.other=@Needy()", "Needy.size has no value: set Needy.size=<int>"),
        ("Needy.size=3", "Needy.size is set on the command line but has no effect: this run uses"),
        ("a/Outer.repeats=3", "a/Outer.repeats is set on the command line but has no effect: no"),
        ("a/n=3", "a/n is set on the command line but nothing uses %a/n"),
        ("--tarjet=x", "unknown flag --tarjet; did you mean 'target'?"),
        ("--zzz", "unknown flag --zzz; flags are --gin_file, --target, --head"),
        ("-q", "unknown flag -q"),
        ("--target", "--target needs a value"),
        ("--target --head=x", "--target needs a value"),
        ("eagle3", "unexpected argument 'eagle3': settings are written Name.parameter=value"),
        ("a-b=3", "'a-b' on the command line is no name"),
        ("=3", "'' on the command line is no name"),
        ("--gin_file=none.gin", "no configuration file 'none.gin' here or in "),
    ],
)
def test_refusals(words: str, message: str) -> None:
    assert message in refused(*words.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Outer.head = eagle3\n", "in a.gin:1: text needs quotes: 'eagle3'"),
        ("\nOuter.repeats 3\n", "cannot read 'Outer.repeats 3' in a.gin:2: "),
        ("Outer.repeats = 3 4\n", "cannot read 'Outer.repeats = 3 4' in a.gin:1: "),
        ("Outer.taps = (1,\n", "cannot read 'Outer.taps = (1,' in a.gin:1: "),
        ("Outer.head = 'x\n", 'cannot read "Outer.head = \'x" in a.gin:1: '),
        ("Outer:\n  repeats = 3\n temperature = 1\n", "cannot read 'temperature = 1' in a.gin:3: "),
        ("Outer.repeats =\n", "cannot read 'Outer.repeats =' in a.gin:1: "),
        ("\n\nOuter.repeats = 'x'\n", "Outer.repeats takes int, got 'x' in a.gin:3"),
        ("Outer:\n  repeat = 3\n", "Outer.repeat in a.gin:2: Outer has no parameter 'repeat'"),
        ("repeats = 3\n", "repeats is set in a.gin:1 but nothing uses %repeats"),
        ("a/Outer.repeats = 3\n", "a/Outer.repeats is set in a.gin:1 but has no effect"),
        ("import os\n", "imports are not needed in a.gin:1"),
        ("include 'b.gin'\n", "no configuration file 'b.gin' in . or in "),
        ("include 'a.gin'\n", "a.gin includes itself"),
    ],
)
def test_refusals_in_files(write, text: str, message: str) -> None:
    assert message in refused(write(text))


def test_missing_include_names_its_line(write) -> None:
    assert ", included in a.gin:2" in refused(write("\ninclude 'b.gin'\n"))


def test_missing_file_names_the_nearest_shipped_one() -> None:
    assert "did you mean 'eval/default.gin'?" in refused("--gin_file=eval/defualt.gin")


def test_operative_replays_identically(tmp_path) -> None:
    words = [
        *("Outer.target=it's", 'Outer.head="q\\"\\n"', "Outer.taps=[1]", "Outer.temperature=1e-7"),
        *("Outer.weights={'a': 2}", "Outer.other=@small/Inner()", "small/Inner.width=1"),
        *("n=5", "Outer.repeats=%n", "entry.steps=3", "Outer.pair=[3,'']"),
    ]

    def run(config: Config) -> tuple[Any, ...]:
        built = config.build("Outer"), config.build("entry", data="x"), config.build("Inner", "s")
        config.check_all_used()
        return built

    first = parse(words)
    built = run(first)
    assert built[0].repeats == 5
    first.save(tmp_path / "config.gin")
    second = parse([f"--gin_file={tmp_path / 'config.gin'}"])
    assert run(second) == built
    assert second.operative() == first.operative()
    assert [path.name for path in tmp_path.iterdir()] == ["config.gin"]


def test_operative_holds_defaults_and_only_what_was_built() -> None:
    config = parse(["Inner.width=2"])
    config.build("Inner")
    lines = config.operative().splitlines()
    assert lines[2:] == ["Inner.width = 2", "Inner.dtype = 'float32'"]


def test_one_configurable_built_twice_replays(tmp_path) -> None:
    def run(config: Config) -> tuple[Inner, Inner]:
        built = config.build("Outer").inner, config.build("Inner")
        config.check_all_used()
        return built

    config = parse([])
    assert run(config) == (Inner(width=8), Inner(width=4))
    config.save(tmp_path / "config.gin")
    assert run(parse([f"--gin_file={tmp_path / 'config.gin'}"])) == (Inner(8), Inner(4))


def test_nothing_is_shared_between_configs() -> None:
    parse(["Outer.repeats=9"]).build("Outer")
    assert parse([]).build("Outer").repeats == 3


def test_override_replaces_settings_and_leaves_the_first_as_it_was() -> None:
    """A macro that only the replaced setting used does not come up as unused."""
    first = parse(["Outer.repeats=%wanted", "wanted=3", "Inner.width=2"])
    second = first.override({"Outer.repeats": 4, "Outer.target": 2024}, "in a test")
    built = second.build("Outer")
    assert (built.repeats, built.target, built.inner.width) == (4, "2024", 2)
    second.check_all_used()
    assert first.build("Outer").repeats == 3
    with pytest.raises(ConfigError, match="takes int, got 'x' in a test"):
        first.override({"Outer.repeats": "x"}, "in a test")
    with pytest.raises(ConfigError, match="no configurable named 'Outre'"):
        first.override({"Outre.repeats": 1}, "in a test")
