"""Two processes with four devices each do what one process with one device does, and end together.

Loopback stands for the network and `out` for the disk that hosts share.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.eval import main as evaluate
from specjax.evaluation import records
from specjax.launch import _free_port
from specjax.processes import Member
from tests.training.files import write_target
from train import eagle3

pytestmark = pytest.mark.hosts
ROOT = Path(__file__).resolve().parents[1]
STEPS = 8
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "4",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    write_target(folder / "target")
    rng = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for i in range(56):
            answer = " ".join(rng.choices(["four", "three", "two", "of course"], k=1 + i % 9))
            turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return folder


def words(folder: Path, out: Path, **mesh: int) -> list[str]:
    return [
        f"--target={folder / 'target'}",
        f"--data={folder / 'data.jsonl'}",
        f"--out={out}",
        f"Trainer.steps={STEPS}",
        "Trainer.batch_size=8",
        "Trainer.save_every=2",
        "Trainer.eval_every=4",
        "Trainer.compute_dtype=float32",
        "Trainer.target_dtype=float32",
        "Data.max_length=96",
        "Data.lengths=(96,)",
        "Data.holdout=8",
        "Eagle3.taps=(1, 2, 3)",
        "Eagle3.mask_shift=2",
        "Eagle3.mlp=8",
        "Eagle3.ttt_length=1",
        *(f"Mesh.{axis}={size}" for axis, size in mesh.items()),
        "Mesh.rules=('vocab=',)",
    ]


def log(out: Path) -> list[dict[str, Any]]:
    path = out / "train.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def launched(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A Python command as two processes."""
    launch = [sys.executable, "-m", "specjax.cli", "launch", "--processes=2", "--devices=4", "--"]
    return subprocess.run(
        [*launch, sys.executable, *command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The run of one process on one device."""
    assert eagle3.main(words(folder, folder / "alone")) == 0
    return folder / "alone"


def test_a_lost_process_ends_the_run_and_the_next_one_resumes(folder: Path, alone: Path) -> None:
    """F36 on several hosts: killed, resumed on another mesh shape, and the curve is the same."""
    out = folder / "together"
    script = [sys.executable, str(ROOT / "train" / "eagle3.py")]
    coordinator = f"127.0.0.1:{_free_port()}"
    pair = [
        subprocess.Popen(
            [*script, *words(folder, out, data=4, fsdp=2), *Member(coordinator, 2, i).flags],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        while len(log(out)) < 4:
            assert [each.poll() for each in pair] == [None, None]
            time.sleep(0.02)
        pair[1].send_signal(signal.SIGKILL)
        _, said = pair[0].communicate(timeout=60)
        assert pair[0].returncode not in (0, None), said
    finally:
        for each in pair:
            each.kill()
            each.wait()
    assert len(log(out)) < STEPS

    again = launched([*script[1:], *words(folder, out, data=2, fsdp=2, tensor=2)])
    assert again.returncode == 0, again.stderr
    assert "[0] resumed at step" in again.stderr and f"of {STEPS}" in again.stderr
    ours = [line for line in again.stderr.splitlines() if line.startswith("[1] ")]
    assert not any(word in line for line in ours for word in ("step", "rows", "head"))  # one tells

    assert [row["step"] for row in log(out)] == list(range(1, STEPS + 1))
    for name in ("loss", "gradient_norm", "acceptance", "tokens"):
        found, wanted = ([row[name] for row in log(run)] for run in (out, alone))
        np.testing.assert_allclose(found, wanted, rtol=2e-4, err_msg=name)
    for step in (4, STEPS):
        found, wanted = (log(run)[step - 1]["heldout_loss"] for run in (out, alone))
        assert found == pytest.approx(wanted, rel=2e-4)
    trained, wanted = (load_file(run / "head" / "model.safetensors") for run in (out, alone))
    assert trained.keys() == wanted.keys()
    for name, weights in trained.items():
        np.testing.assert_allclose(weights, wanted[name], atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_evaluation_is_that_of_one_process(folder: Path, alone: Path) -> None:
    """The same texts and the same acceptance, and one set of results."""
    prompts = ("1?", "two of?", "three and four", "5?", "of course")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{p}"}}\n' for p in prompts))
    given = [
        f"--target={folder / 'target'}",
        f"--head={alone / 'head'}",
        f"--prompts={folder / 'prompts.jsonl'}",
        "--trace=5",
        "Eval.concurrency=4",
        "Eval.num_speculative_tokens=2",
        "Eval.max_new_tokens=10",
        "Eval.repeats=1",
        "Eval.time_shares=False",
        "Eval.baseline_dtypes=('float32',)",
        "Engine.prefill_chunk=16",  # one program for prompts of any length
    ]
    assert evaluate([*given, f"--out={folder / 'one'}"]) == 0
    mesh = ("Mesh.data=4", "Mesh.tensor=2", "Mesh.rules=('vocab=',)")
    found = launched(["-m", "specjax.eval", *given, *mesh, f"--out={folder / 'two'}"])
    assert found.returncode == 0, found.stderr
    assert "[0] Results: " in found.stdout and "[1] Results: " not in found.stdout

    both = [records.read(folder / name) for name in ("one", "two")]
    for one, two in zip(*both, strict=True):
        assert two["mesh"] == "data=4 tensor=2 vocab="
        for name in ("head", "output_tokens", "drafted_per_position", "accepted_per_position"):
            assert one[name] == two[name], name
        assert two["identical"] == len(prompts)
    texts = [[each["emitted"] for t in rows[1]["trace"] for each in t["rounds"]] for rows in both]
    assert texts[0] == texts[1] and len(texts[0]) >= len(prompts)
