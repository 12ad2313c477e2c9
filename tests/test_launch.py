"""The launcher, with commands that need no jax: what it says, and which exit code it gives."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specjax import launch

# A command that knows its process: the last word is --process=I.
PRELUDE = "import os, signal, sys, time; me = int(sys.argv[-1].removeprefix('--process='));"


def command(body: str) -> list[str]:
    return ["--", sys.executable, "-c", PRELUDE + body]


def test_lines_carry_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    body = "print(*sys.argv[1:]); print(os.environ['JAX_NUM_CPU_DEVICES'], file=sys.stderr)"
    assert launch.main(["--processes", "2", "--devices=4", *command(body), "A.b=c"]) == 0
    out, err = capfd.readouterr()
    lines = sorted(out.splitlines())
    assert len(lines) == 2
    for index, line in enumerate(lines):
        assert line.startswith(f"[{index}] A.b=c --coordinator=127.0.0.1:")
        assert line.endswith(f" --processes=2 --process={index}")
    assert len({line.split()[2] for line in lines}) == 1  # one coordinator
    assert sorted(err.splitlines()) == ["[0] 4", "[1] 4"]


def test_a_lost_process_is_named_and_the_others_are_stopped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    body = "os.kill(os.getpid(), signal.SIGKILL) if me == 1 else time.sleep(60); print('slept')"
    assert launch.main(["--processes=3", *command(body)]) == 128 + signal.SIGKILL
    out, err = capfd.readouterr()
    assert out == ""  # nobody came to his end
    assert err.splitlines() == [
        "specjax launch: process 1 of 0 to 2 was lost (killed by SIGKILL); the others were stopped"
    ]


def test_a_failed_process_gives_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--processes=2", *command("sys.exit(7 * me)")]) == 7
    assert "process 1 of 0 to 1 failed (exit code 7)" in capfd.readouterr().err


def test_processes_that_hang_are_killed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    body = f"""
if me == 0:
    {deaf}; time.sleep(60)
time.sleep(2); sys.exit(3)"""
    assert launch.main(["--processes=2", *command(body)]) == 3
    assert "[0] deaf" in capfd.readouterr().out


def test_signals_are_passed_on(tmp_path: Path) -> None:
    """SIGTERM to the launcher lets every process end in its own way."""
    body = f"""
def leave(*_):
    open({str(tmp_path)!r} + f"/{{me}}", "w").close(); sys.exit(143)
signal.signal(signal.SIGTERM, leave); print("ready", flush=True); time.sleep(60)"""
    words = [sys.executable, "-m", "specjax.cli", "launch", "--processes=2", *command(body)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert sorted(child.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    child.terminate()
    _, said = child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM
    assert "all 2 processes were stopped" in said
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes=2"], "give the command after --"),
        (["--", "true"], "required: --processes"),
        (["--processes=two", "--", "true"], "invalid int value: 'two'"),
        (["--processes=0", "--", "true"], "--processes must be at least 1"),
        (["--processes=2", "--", "no-such-command"], "'no-such-command' cannot be started"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specjax: error: launch: ") and message in line


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--help"]) == 0
    assert "usage: specjax launch --processes N" in capsys.readouterr().out
