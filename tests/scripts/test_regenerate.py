import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts import regenerate
from specjax.core.errors import DataError
from tests.training.files import write_target

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regenerate")
    write_target(folder / "target")
    with (folder / "prompts.jsonl").open("w") as file:
        for i in range(PROMPTS):
            turns = [f"question {i}?"] + ["and three?"] * (i % 5 == 0)
            file.write(json.dumps({"turns": turns}) + "\n")
    return folder


def arguments(folder: Path, output: Path, **changes: Any) -> list[str]:
    given = {
        "target": folder / "target",
        "prompts": folder / "prompts.jsonl",
        "output": output,
        "max-new-tokens": 9,
        "concurrency": 3,
        "dtype": "float32",
        "suffix": "gsm8k",
        **changes,
    }
    return [f"--{name}={value}" for name, value in given.items()]


def read(path: Path, torn: bool = False) -> dict[int, dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True)
    if torn and lines and not lines[-1].endswith("\n"):
        lines.pop()  # a kill within a write
    rows = [json.loads(line) for line in lines]
    assert len({row["prompt_index"] for row in rows}) == len(rows), "a prompt was answered twice"
    return {row["prompt_index"]: row for row in rows}


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> dict[int, dict[str, Any]]:
    output = folder / "unbroken.jsonl"
    assert regenerate.main(arguments(folder, output)) == 0
    return read(output)


def test_rows(folder: Path, unbroken: dict[int, dict[str, Any]]) -> None:
    assert sorted(unbroken) == list(range(PROMPTS))
    for index, row in unbroken.items():
        roles = [m["role"] for m in row["messages"]]
        assert roles == ["user", "assistant"] * (2 if index % 5 == 0 else 1)
        first = row["messages"][0]["content"]
        assert first == f"question {index}?{regenerate.SUFFIXES['gsm8k']}"
        for message in row["messages"][1::2]:
            assert set(message) <= {"role", "content", "finish_reason"}
        cut = "finish_reason" in row["messages"][-1]
        assert row["finish_reason"] == ("length" if cut else "stop")
        assert 0 < row["num_tokens"] <= 18


def test_text_is_the_targets_own(folder: Path, unbroken: dict[int, dict[str, Any]]) -> None:
    """The answer's tokens, read back as training reads them, are the target's greedy choice."""
    import jax.numpy as jnp
    from transformers import AutoTokenizer

    from specjax import targets
    from specjax.data.chat import ChatEncoder

    target, params = targets.load(folder / "target")
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(folder / "target"), (2,))
    row = next(row for i, row in sorted(unbroken.items()) if row["exact"] and i % 5)
    ids = encoder.encode(row["messages"]).ids
    prompt = encoder.prompt_ids(row["messages"][:1])
    out = target.forward(params, jnp.asarray(ids[None]))
    best = jnp.argmax(target.logits(params, out.hidden), -1)[0]
    start, end = len(prompt), len(prompt) + row["num_tokens"]
    assert best[start - 1 : end - 1].tolist() == ids[start:end].tolist()


def test_reports_texts_that_do_not_read_back(
    folder: Path, unbroken: dict[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert regenerate.main(arguments(folder, folder / "unbroken.jsonl")) == 0  # all is done
    other = sum(not row["exact"] for row in unbroken.values())
    assert other  # a random model writes broken UTF-8
    shown = capsys.readouterr().out
    assert f"{PROMPTS} answers to {PROMPTS} prompts" in shown
    assert f"{other} whose text is tokenised otherwise" in shown


CHILD = """
import sys, time
from scripts import regenerate

append = regenerate.AnswerFile.append
def slow(self, row):
    append(self, row)
    time.sleep(0.5)
regenerate.AnswerFile.append = slow
sys.exit(regenerate.main(sys.argv[1:]))
"""


def kill(folder: Path, output: Path, rng: random.Random) -> int:
    """Kill a run within half a second of its first new answer; returns its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CHILD, *arguments(folder, output)]
    had = output.stat().st_size if output.exists() else 0
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    while child.poll() is None and not (output.exists() and output.stat().st_size > had):
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 0.45))
    child.send_signal(signal.SIGKILL)
    _, shown = child.communicate()
    assert child.returncode in (-signal.SIGKILL, 0), shown.decode()[-2000:]
    return child.returncode


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_kill_and_resume(
    folder: Path, tmp_path: Path, unbroken: dict[int, dict[str, Any]], kills: int
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng, output = random.Random(seed), tmp_path / "killed.jsonl"
    codes, before = [], {}
    for _ in range(kills):
        codes.append(kill(folder, output, rng))
        now = read(output, torn=True)
        assert before.items() <= now.items()  # nothing that was answered is lost
        before = now
    assert codes.count(-signal.SIGKILL) >= min(kills, 10)
    with output.open("a") as file:
        file.write('{"messages": [{"role": "us')  # as a kill within a write leaves it
    assert regenerate.main(arguments(folder, output)) == 0
    assert before.items() <= read(output).items()
    assert read(output) == unbroken


def test_limit_can_grow(folder: Path, tmp_path: Path, unbroken: dict[int, dict[str, Any]]) -> None:
    output = tmp_path / "limit.jsonl"
    assert regenerate.main(arguments(folder, output, limit=2)) == 0
    assert sorted(read(output)) == [0, 1]
    assert regenerate.main(arguments(folder, output, limit=4)) == 0
    assert read(output) == {i: unbroken[i] for i in range(4)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max-new-tokens": 5}, "max_new_tokens was 9, is now 5"),
        ({"suffix": ""}, "suffix was"),
        ({"temperature": 0.5}, "temperature was 0.0, is now 0.5"),
    ],
)
def test_refuses_other_settings(
    folder: Path,
    unbroken: dict[int, dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    assert regenerate.main(arguments(folder, folder / "unbroken.jsonl", **changes)) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
    assert read(folder / "unbroken.jsonl") == unbroken


def test_refuses_a_second_writer_and_foreign_lines(tmp_path: Path) -> None:
    file = regenerate.AnswerFile(tmp_path / "a.jsonl", {})
    with pytest.raises(DataError, match="another process is writing"):
        regenerate.AnswerFile(tmp_path / "a.jsonl", {})
    file.append({"prompt_index": 0})
    file.close()
    with (tmp_path / "a.jsonl").open("a") as text:
        text.write('{"other": 1}\n')
    with pytest.raises(DataError, match="jsonl:2 is not an answer"):
        regenerate.AnswerFile(tmp_path / "a.jsonl", {})


def test_refuses_a_prompt_that_does_not_fit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(folder, tmp_path / "b.jsonl", **{"max-new-tokens": 500})
    assert regenerate.main(words) == 2
    assert "prompt 0 of" in (shown := capsys.readouterr().err) and "the target takes 12" in shown


def test_another_template_is_another_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plain.jsonl"
    assert regenerate.main(arguments(folder, output, limit=1, **{"chat-template": "plain"})) == 0
    settings = json.loads((tmp_path / "plain.settings.json").read_text())
    assert settings["rendering"] == ["plain", None, True]
    capsys.readouterr()
    assert regenerate.main(arguments(folder, output, limit=2)) == 2
    said = capsys.readouterr().err
    assert "rendering" in said and said.count("\n") == 1
