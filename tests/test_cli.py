"""The command line's frame: exit codes, one-line errors, help without heavy imports."""

import dataclasses
import subprocess
import sys

import pytest

import specjax
from specjax import cli, configurables, eval
from specjax.core.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Small:
    """A command's settings.

    Attributes:
      steps: how many steps.
    """

    steps: int = 3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Small]:
    """Make `specjax small` a command; the list receives what it was run with."""
    calls: list[Small] = []
    module = type(sys)("small_command")

    def body(config) -> None:
        calls.append(config.build("Small"))
        config.check_all_used()

    module.main = lambda argv=None: cli.run_door(
        body, argv, usage="usage: small", names=("Small",), short={"steps": "Small.steps"}
    )
    monkeypatch.setitem(sys.modules, "small_command", module)
    monkeypatch.setitem(configurables.REGISTRY, "Small", Small)
    monkeypatch.setitem(cli.COMMANDS, "small", ("small_command:main", "a small command"))
    return calls


def test_command_runs_with_its_settings(small: list[Small]) -> None:
    assert cli.main(["small", "--steps", "5"]) == 0
    assert small == [Small(5)]


def test_words_come_from_the_process(small: list[Small], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["specjax", "small", "Small.steps=7"])
    assert cli.main() == 0
    assert small == [Small(7)]


def test_mistake_is_one_line_and_exit_code_2(small: list[Small], capsys) -> None:
    assert cli.main(["small", "Small.step=5"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "specjax: error: Small.step on the command line: Small has no parameter 'step'; "
        "did you mean 'steps'?\n"
    )
    assert small == []


def test_unknown_command(capsys) -> None:
    assert cli.main(["evl"]) == 2
    assert "no command 'evl'; did you mean 'eval'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_usage_lists_the_commands(words: list[str], capsys) -> None:
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(name in out and doc in out for name, (_, doc) in cli.COMMANDS.items())


def test_version(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"specjax {specjax.__version__}\n"


def test_help_is_a_table(small: list[Small], capsys) -> None:
    assert cli.main(["small", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: small\n")
    assert "short for Small.steps" in out
    row = next(line for line in out.splitlines() if line.startswith("Small.steps"))
    assert row.split() == ["Small.steps", "int", "3", "how", "many", "steps."]
    assert small == []


def test_exit_codes(capsys) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    def mistake() -> int:
        raise DataError("two\n  lines")

    def fault() -> int:
        raise RuntimeError("a fault of ours is no user's mistake")

    assert cli.guarded(lambda: 0) == 0
    assert cli.guarded(interrupt) == 130
    assert cli.guarded(mistake) == 2
    assert capsys.readouterr().err.endswith("specjax: error: two lines\n")
    with pytest.raises(RuntimeError):
        cli.guarded(fault)


def test_every_command_exists() -> None:
    for name in cli.COMMANDS:
        assert callable(cli._command(name))
    with pytest.raises(ConfigError):
        cli._command("nothing")


def test_eval_hands_its_settings_to_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    runner = type(sys)("specjax.evaluation.runner")

    def run_sweep(evaluations, sweep, operative):
        calls.append((evaluations, sweep, operative))
        return [{"error": None}, {"error": "it failed" if len(calls) > 1 else None}]

    runner.run_sweep = run_sweep
    monkeypatch.setitem(sys.modules, "specjax.evaluation.runner", runner)
    monkeypatch.setattr("specjax.evaluation.runner", runner, raising=False)
    assert eval.main(["--target", "some/dir", "--head", "none", "--prompts", "a.jsonl"]) == 0
    ((evaluation,), sweep, operative), *rest = calls
    assert not rest
    assert evaluation.target == "some/dir"
    assert not sweep.grid
    assert "Eval.target = 'some/dir'" in operative.splitlines()
    # A sweep: an evaluation a cell, and a cell that failed makes the exit code 1.
    words = ["--target=t", "--prompts=p", "--sweep=head=a,b", "--sweep", "Engine.capacity=64,128"]
    assert eval.main(words) == 1
    evaluations, sweep, operative = calls[1]
    assert [(e.head, e.engine.capacity) for e in evaluations] == [
        ("a", 64),
        ("a", 128),
        ("b", 64),
        ("b", 128),
    ]
    replayed = "Sweep.grid = {'head': ('a', 'b',), 'Engine.capacity': (64, 128,)}"
    assert replayed in operative.splitlines()


def test_help_imports_nothing_heavy() -> None:
    # Every configurable is looked up, as --help of every command together would.
    code = """
import sys
from specjax import cli, configurables, eval
assert configurables.table()
eval.main(["--help"])
heavy = {"jax", "flax", "torch", "transformers", "datasets", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Eval.target" in done.stdout


@pytest.mark.parametrize("module", ["specjax.cli", "specjax.eval"])
def test_modules_are_programs(module: str) -> None:
    words = {"specjax.cli": ["eval", "--tarjet=x"], "specjax.eval": ["--tarjet=x"]}[module]
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == ("specjax: error: unknown flag --tarjet; did you mean 'target'?\n")
