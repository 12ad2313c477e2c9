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

from scripts import cache_features
from specjax.targets import loading
from specjax.training.features import fill as filling
from tests.training.files import write_target
from train import eagle3

ROOT = Path(__file__).resolve().parents[2]
ROWS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    write_target(folder / "target")
    rng = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for i in range(ROWS):
            answer = " ".join(rng.choices(["four", "three", "two", "of course"], k=1 + i % 9))
            turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return folder


def arguments(folder: Path, output: Path, **changes: Any) -> list[str]:
    flags = {
        "target": folder / "target",
        "data": folder / "data.jsonl",
        "out": output,
        "head": "eagle3",
        **changes,
    }
    return [
        *(f"--{name}={value}" for name, value in flags.items()),
        "Data.max_length=96",
        "Data.lengths=(96,)",
        "Features.chunk_mib=8",
        "Features.batch_size=3",
        "Eagle3.taps=(1, 2, 3)",
        "Eagle3.mask_shift=2",
    ]


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiB that are KiB: several files for few tokens."""
    monkeypatch.setattr(filling, "_MIB", 1 << 10)


def contents(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.iterdir()}


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "_MIB", 1 << 10)
        assert cache_features.main(arguments(folder, folder / "unbroken")) == 0
    found = contents(folder / "unbroken")
    assert len(found) > 20
    return found


CHILD = """
import sys, time
from pathlib import Path
from scripts import cache_features
from specjax.io import hf
from specjax.training.features import fill, store

fill._MIB = 1 << 10
save, sync = hf.save_file, store._sync

def slow_save(tensors, path, metadata):
    save(tensors, path, metadata)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])
    time.sleep(0.03)
    Path(path).write_bytes(whole)

def slow_sync(path):
    time.sleep(0.03)
    sync(path)

hf.save_file, store._sync = slow_save, slow_sync
sys.exit(cache_features.main(sys.argv[1:]))
"""


def kill_and_resume(folder: Path, cache: Path, kills: int) -> None:
    """Kill the script at random instants of its work; then let it finish."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    command = [sys.executable, "-c", CHILD, *arguments(folder, cache)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    for _ in range(kills):
        child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        shown = ""
        while "bytes each" not in shown and (line := child.stderr.readline()):
            shown += line  # the imports and the load are over when the estimate is printed
        if rng.random() < 0.7:  # past the compilation, then
            child.stderr.readline()
        time.sleep(rng.uniform(0.0, 0.5))
        child.send_signal(signal.SIGKILL)
        _, rest = child.communicate()
        assert child.returncode in (-signal.SIGKILL, 0), (shown + rest)[-2000:]
        print(f"{len(list(cache.glob('*.json'))) - 1} files when killed")
    assert cache_features.main(arguments(folder, cache)) == 0


@pytest.mark.usefixtures("small_files")
def test_kill_and_resume(folder: Path, tmp_path: Path, unbroken: dict[str, bytes]) -> None:
    """Byte for byte what an unbroken run writes: no row is lost or there twice."""
    kill_and_resume(folder, tmp_path / "cache", 3)
    assert contents(tmp_path / "cache") == unbroken


@pytest.mark.slow
@pytest.mark.usefixtures("small_files")
def test_many_kills(folder: Path, tmp_path: Path, unbroken: dict[str, bytes]) -> None:
    for i in range(4):
        kill_and_resume(folder, tmp_path / f"cache{i}", 4)
        assert contents(tmp_path / f"cache{i}") == unbroken


@pytest.mark.usefixtures("small_files")
def test_estimate_and_closing_line(
    folder: Path, tmp_path: Path, unbroken: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads(unbroken["features.json"])
    tokens = manifest["tokens"]
    assert manifest["rows"] == ROWS
    assert list(manifest["streams"]) == ["tap 1", "tap 2", "tap 3", "hidden"]
    assert cache_features.main(arguments(folder, folder / "unbroken")) == 0  # all is there
    shown = capsys.readouterr()
    assert f"{tokens:,} tokens of {ROWS} rows, 256 bytes each (tap 1, tap 2" in shown.err
    assert f"files: {manifest['chunks']}, {manifest['chunks']} there already" in shown.err
    assert "train with Trainer.features=" in shown.out
    sizes = sum(len(content) for name, content in unbroken.items() if name.endswith("tensors"))
    assert 0 <= sizes - 256 * tokens < 200 * manifest["chunks"]  # the estimate, and headers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head=eagel3"], "nor the folder of a head; did you mean 'eagle3'?"),
        (["--head="], "nothing says which features"),
        (["--out="], "--out (Trainer.features) must name the folder"),
        (["--storage=int8"], "Features.storage takes 'bfloat16' | 'fp8'"),
        (["Trainer.out=runs/x"], "Trainer.out is set on the command line but has no effect"),
        (["--storage=fp8"], "something else: storage was 'bfloat16', is now 'fp8'"),
        (["Features.taps=(9,)"], "residual streams 0 to 4, not [9]"),
    ],
)
@pytest.mark.usefixtures("small_files", "unbroken")
def test_mistakes_are_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache_features.main([*arguments(folder, folder / "unbroken"), *words]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("specjax: error: ") and message in last


def train(folder: Path, out: Path, *words: str) -> tuple[list[float], Path]:
    """The losses of train/eagle3.py, and its run."""
    given = [
        word.replace("--out=", "Trainer.features=")
        for word in arguments(folder, folder / "unbroken")
        if not word.startswith(("Features", "--head"))
    ]
    small = ("Trainer.steps=2", "Trainer.batch_size=3", "Eagle3.mlp=8", "Eagle3.ttt_length=1")
    assert eagle3.main([*given, f"--out={out}", *small, *words]) == 0
    records = map(json.loads, (out / "train.jsonl").read_text().splitlines())
    return [record["loss"] for record in records], out


@pytest.mark.usefixtures("unbroken")
def test_a_head_trains_on_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The losses of online training, by a process that holds no layer of the target."""
    online, _ = train(folder, tmp_path / "online", "Trainer.features=")
    held = []
    load = loading.load_params

    def note(specs: Any, *given: Any, **more: Any) -> Any:
        held.append(specs)
        return load(specs, *given, **more)

    monkeypatch.setattr(loading, "load_params", note)
    cached, out = train(folder, tmp_path / "cached")
    assert len(held) == 1 and held[0].layers == ()
    assert len(cached) == 2 and cached == pytest.approx(online, rel=2e-3)
    card = (out / "head" / "README.md").read_text()
    assert "the target's features from a cache in bfloat16" in card
    capsys.readouterr()
    with pytest.raises(AssertionError):
        train(folder, tmp_path / "other", "Data.max_length=20", "Data.chat_template=plain")
    assert "max_length was 96, is now 20" in capsys.readouterr().err


@pytest.mark.parametrize(("head", "streams"), [("mtp", 1), ("gemma4_mtp", 3)])
def test_heads_by_name(folder: Path, tmp_path: Path, head: str, streams: int) -> None:
    words = [w for w in arguments(folder, tmp_path, head=head) if not w.startswith("Eagle3")]
    assert cache_features.main([*words, "Features.taps=(2,)", "--storage=fp8"]) == 0
    manifest = json.loads((tmp_path / "features.json").read_text())
    assert len(manifest["streams"]) == streams + 1 and "tap 2" in manifest["streams"]
