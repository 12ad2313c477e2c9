"""Which process of a run a command is, from its flags."""

from __future__ import annotations

import pytest

from specjax import processes
from specjax.core.errors import ConfigError
from specjax.processes import Member, take
from train import eagle3


def test_a_command_is_on_its_own() -> None:
    assert take(["--target", "x", "Eval.seed=1"]) == (None, ["--target", "x", "Eval.seed=1"])


def test_flags_are_taken_out() -> None:
    words = ["--target", "x", "--coordinator", "host:1", "--processes=2", "A.b=1", "--process", "1"]
    assert take(words) == (Member("host:1", 2, 1), ["--target", "x", "A.b=1"])
    assert take(["--cluster=slurm", "A.b=1"]) == (Member(cluster="slurm"), ["A.b=1"])


def test_what_the_launcher_writes_is_read_back() -> None:
    member = Member("127.0.0.1:9", 4, 3)
    assert take(member.flags) == (member, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--process=1"], "need --coordinator, --processes too"),
        (["--cluster=auto", "--process=1"], "--cluster finds the processes itself"),
        (["--coordinator=h:1", "--processes=2", "--process=2"], "from 0 to below --processes 2"),
        (["--coordinator=h:1", "--processes=x", "--process=0"], "--processes must be a whole"),
        (["--coordinator=h", "--processes=2", "--process=0"], "should read HOST:PORT, got 'h'"),
        (["--coordinator=h:1", "--process=0", "--processes"], "--processes needs a value"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        take(words)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_cluster_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """jax asks the cluster, and we say in one line that there is none."""
    words = ["--target=t", "--data=d", "--out=o", "--cluster=ompi"]
    assert eagle3.main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("specjax: error: the processes of this run were not found by ompi: ")


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert eagle3.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{name}" in out for name in processes.FLAGS)
