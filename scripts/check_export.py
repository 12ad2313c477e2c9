"""Does another package read an exported head as we do? Its draft logits against ours.

    python scripts/check_export.py EXPORT [--target TARGET] [--env DIR | --python PYTHON]

EAGLE-3, DFlash, DSpark and MTP heads in speculators' layout are loaded with `speculators` 0.9,
Gemma 4 assistants with `transformers`, in an environment of their own, since their pins differ
from ours: --env names its folder (made on first use; default in the user's cache, 1.5 GB),
--python an interpreter that has the packages already. Both sides get the same small text, random
states of the target and its true embedding and output rows, and compute in float32; ours drafts
as in decoding. TARGET defaults to the one that the export names.

Exit code 0: they agree. 1: they differ, or the package refuses the head. 2: a mistake here.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specjax.core.errors import CheckpointError, ConfigError, PairingError, SpecJaxError

if TYPE_CHECKING:
    from specjax.heads.base import Borrowed

PACKAGES = ("speculators==0.9.0", "hs-connectors==0.9.0")
"""Installed without what they name beside, of which these are what reading a head takes."""
NEEDS = (
    "torch==2.13.0",
    "transformers>=5.2,<=5.19",
    "datasets>=4,<=5.1",
    "aiohttp",
    "httpx",
    "loguru",
    "numpy>=2,<=2.5.4",
    "openai",
    "protobuf",
    "psutil",
    "pydantic>=2",
    "pydantic-settings>=2",
    "rich",
    "safetensors",
    "typer",
)
BOUND = 1e-4
"""Largest difference allowed, as a share of the largest logit."""
PREFIX, DRAFTS = 12, 3
READER = Path(__file__).resolve().parent / "export_reader.py"
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Line:
    """What was compared, and how far apart it is.

    Attributes:
        name: "draft 1" or "confidence 1".
        largest: largest absolute value.
        difference: largest difference.
        same: the most probable token is the same; None where there is none.
    """

    name: str
    largest: float
    difference: float
    same: bool | None

    @property
    def agrees(self) -> bool:
        """Whether the difference is one of rounding."""
        return self.difference <= BOUND * max(1.0, self.largest) and self.same is not False


def environment(folder: Path) -> Path:
    """Return the interpreter of an environment with speculators, which is made if needed.

    Raises:
        ConfigError: it cannot be installed; the last line of pip says why.
    """
    python, ready = folder / "bin" / "python", folder / "ready.txt"
    wanted = "\n".join((*NEEDS, *PACKAGES)) + "\n"
    if ready.is_file() and ready.read_text() == wanted:
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, *NEEDS],
        [*pip, "--no-deps", *PACKAGES],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            raise ConfigError(f"{folder} could not be made: {said[-1] if said else command[2]}")
    ready.write_text(wanted)
    return python


def cache_folder() -> Path:
    """Return the folder of the environment where none is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "specjax" / PACKAGES[0].replace("==", "-")


def ours(folder: Path, target_path: str) -> tuple[str, Arrays, Arrays]:
    """Draft after a random text.

    Returns:
        (the kind of head, what another reader is given, what we make of it).

    Raises:
        PairingError: the head does not belong to the target.
        CheckpointError: a layout that neither package reads.
    """
    import jax

    from specjax import heads, targets
    from specjax.heads.base import borrow
    from specjax.io.hf import TensorReader, read_config

    config, stored = read_config(folder), TensorReader(folder)
    if "speculators_model_type" not in config and config.get("model_type") != "gemma4_assistant":
        raise CheckpointError(
            f"{folder}: only speculators' layout and Gemma 4 assistants can be checked; write it"
            " with scripts/export_head.py --layout speculators"
        )
    if "d2t" in stored.shapes and "lm_head.weight" not in stored.shapes:
        raise CheckpointError(
            f"{folder} was written with --bodies-only: the output rows of a draft vocabulary are"
            " what SpecJAX alone takes from the target; check the export that holds them"
        )
    # The target's rows in the dtype of the export, as both would be served.
    dtype = str(stored.read(next(n for n in stored.shapes if n.endswith("norm.weight"))).dtype)
    target, weights = targets.load(target_path, dtype)
    borrowed = jax.tree.map(lambda table: table.astype("float32"), borrow(target, weights))
    head, params = heads.load(folder, target.info, borrowed=borrowed)
    count = min(DRAFTS, head.max_tokens or DRAFTS)
    given = _given(head, target.info)
    made = _drafted(head, params, borrowed, given, count)
    given["drafts"] = made.pop("drafts")
    if head.name == "mtp":
        made["logits"] = _forced(head, params, borrowed, given)
    if head.name == "gemma4_mtp":
        fed = np.concatenate([given["tokens"][-1:], given["drafts"][:-1]])
        rows = np.asarray(borrowed.embedding)[fed] * np.float32(head.embed_scale)
        given["embedded"] = rows.astype(np.float32)
    return head.name, given, made


def _given(head: Any, info: Any) -> Arrays:
    """Return a random text with states of the target, and keys where the head reads some."""
    windows = [getattr(layer.cache, "window", PREFIX) for layer in getattr(head, "keys", ())]
    prefix = min(PREFIX, *windows) if windows else PREFIX
    rng = np.random.default_rng(0)
    shape = (max(len(head.taps), 1), prefix, info.hidden)
    given: Arrays = {
        "tokens": rng.integers(0, info.vocab, prefix + 1),
        "hidden": rng.normal(size=shape[1:]).astype(np.float32),
        "taps": rng.normal(size=shape).astype(np.float32),
    }
    for layer in getattr(head, "keys", ()):
        kind = "sliding" if hasattr(layer.cache, "window") else "full"
        for part, size in (("key", layer.cache.k_dim), ("value", layer.cache.v_dim)):
            shape = (1, layer.cache.kv_heads, prefix, size)
            given[f"{part}.{kind}_attention"] = rng.normal(size=shape).astype(np.float32)
    return given


def _drafted(head: Any, params: Any, borrowed: Borrowed, given: Arrays, count: int) -> Arrays:
    """Draft as in decoding."""
    import jax
    import jax.numpy as jnp

    from specjax.heads.base import DraftContext, Observation
    from specjax.layers.sampling import Sampling

    tokens = jnp.asarray(given["tokens"], jnp.int32)[None]
    prefix = jnp.asarray([tokens.shape[1] - 1])
    seen = Observation(
        tokens=tokens[:, :-1],
        next_tokens=tokens[:, 1:],
        hidden=jnp.asarray(given["hidden"])[None],
        taps=jnp.asarray(given["taps"])[:, None],
        count=prefix,
        start=jnp.zeros_like(prefix),
    )
    keys = []
    for layer in getattr(head, "keys", ()):
        kind = "sliding" if hasattr(layer.cache, "window") else "full"
        new = tuple(jnp.asarray(given[f"{part}.{kind}_attention"]) for part in ("key", "value"))
        empty = layer.cache.empty(1, int(prefix[0]), "float32")
        keys.append(layer.cache.write(empty, jnp.zeros_like(prefix), new, prefix))
    around = DraftContext(
        anchor=tokens[:, -1],
        position=prefix,
        tokens=tokens,
        lengths=prefix + 1,
        sampling=Sampling.of(1),
        keys=tuple(keys),
    )

    def run(params: Any, borrowed: Borrowed) -> Any:
        state = head.observe(params, borrowed, head.init_state(1, tokens.shape[1] + count), seen)
        return head.draft(params, borrowed, state, around, count)

    proposal, *rest = jax.jit(run)(params, borrowed)
    made = {"drafts": np.asarray(proposal.tokens[0], np.int64)}
    if head.name in ("dflash", "dspark"):
        made["logits"] = np.asarray(rest[0].logits[0])
        if rest[0].confidence_logits is not None:
            made["confidence"] = np.asarray(rest[0].confidence_logits[0])
    else:
        made["logits"] = np.stack([np.asarray(x[0]) for x in rest[-1]])
    return made


def _forced(head: Any, params: Any, borrowed: Borrowed, given: Arrays) -> np.ndarray:
    """Return MTP's logits with every step a pass over the whole text, as speculators has it.

    The first is decoding's; in the later ones decoding attends to the first pass's keys.
    """
    import jax.numpy as jnp

    from specjax.heads.mtp.loss import forced_pass
    from specjax.heads.mtp.network import carry, draft_logits

    text = jnp.asarray(np.concatenate([given["tokens"], given["drafts"]]), jnp.int32)[None]
    states = jnp.asarray(given["hidden"])[None]
    made = []
    for k in range(len(given["drafts"])):
        module = params.modules[min(k, head.modules - 1)]
        tokens = text[:, k + 1 : k + 1 + states.shape[1]]
        out = forced_pass(head, module, borrowed, states, tokens)
        made.append(np.asarray(draft_logits(head, module, borrowed, out)[0, -1]))
        states = carry(head, module, out)
    return np.stack(made)


def theirs(python: Path, folder: Path, target_path: str, given: Arrays) -> Arrays:
    """Run the other package.

    Raises:
        PairingError: it refuses the head, in its own words.
    """
    from safetensors.numpy import load_file, save_file

    with tempfile.TemporaryDirectory() as scratch:
        files = [str(Path(scratch) / name) for name in ("given", "made")]
        save_file({name: np.ascontiguousarray(x) for name, x in given.items()}, files[0])
        command = [str(python), str(READER), str(folder), target_path, *files]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise PairingError(f"refused: {_reason(done.stderr)}")
        return load_file(files[1])


def _reason(stderr: str) -> str:
    """Return what stands behind the last traceback, in one line."""
    lines = stderr.rpartition("Traceback (most recent call last):")[2].splitlines()[1:]
    while lines and lines[0].startswith(" "):
        del lines[0]
    return " ".join(" ".join(lines).split())[:400] or "without a word"


def compare(our: Arrays, their: Arrays) -> list[Line]:
    """Return a line per draft, and per confidence where there are any."""
    lines = []
    for name, label in (("logits", "draft"), ("confidence", "confidence")):
        if (name in our) != (name in their):
            raise PairingError(f"one side has {name}, the other has not")
        for k, (a, b) in enumerate(zip(our.get(name, ()), their.get(name, ()), strict=False), 1):
            counted = np.isfinite(a)  # tokens out of reach have no logit of ours
            a, b = a[counted], b[counted]
            same = bool(np.argmax(a) == np.argmax(b)) if name == "logits" else None
            far = float(np.max(np.abs(a - b)))
            far = far if np.isfinite(far) else np.inf
            lines.append(Line(f"{label} {k}", float(np.max(np.abs(a))), far, same))
    return lines


def run(args: argparse.Namespace, console: Console) -> bool:
    """Compare and print; returns whether both agree."""
    from specjax.io.hf import read_config, resolve

    folder = resolve(args.export)
    target = resolve(args.target or _named(read_config(folder), folder))
    kind, given, our = ours(folder, str(target))
    python = args.python or environment(args.env or cache_folder())
    try:
        lines = compare(our, theirs(python, folder, str(target), given))
    except PairingError as error:
        console.print(f"{kind}: {error}", markup=False, soft_wrap=True)
        return False
    table = Table(box=None)
    for name in ("", "largest", "difference", "best token"):
        table.add_column(name, justify="left" if not name else "right")
    for line in lines:
        best = {True: "same", False: "OTHER", None: ""}[line.same]
        table.add_row(line.name, f"{line.largest:.2f}", f"{line.difference:.1e}", best)
    console.print(table)
    agree = all(line.agrees for line in lines)
    other = "transformers" if kind == "gemma4_mtp" else PACKAGES[0].replace("==", " ")
    verdict = "reads it as we do" if agree else f"reads it OTHERWISE (bound {BOUND:g})"
    console.print(f"{kind}: {other} {verdict}")
    return agree


def _named(config: dict[str, Any], folder: Path) -> str:
    """Return the target that an export names."""
    from specjax.heads import pairing

    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path") or (config.get(pairing.FIELD) or {}).get("target")
    if not name:
        raise ConfigError(f"{folder} names no target: give --target")
    return str(name)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", metavar="EXPORT", help="directory or hub id of the head")
    parser.add_argument("--target", default="", help="directory or hub id")
    parser.add_argument("--env", type=Path, help="folder of the other package's environment")
    parser.add_argument("--python", type=Path, help="an interpreter that has the packages")
    args = parser.parse_args(argv)
    try:
        return 0 if run(args, Console(width=100)) else 1
    except SpecJaxError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
