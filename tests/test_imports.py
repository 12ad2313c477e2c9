"""Who may import whom, read from the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A package may import itself and those of a lower rank; equals do not know each other.
RANK = {
    "core": 0,
    **dict.fromkeys(("io", "data", "demo", "layers"), 1),
    "targets": 2,
    "heads": 3,
    "verify": 4,
    "decode": 5,
    **dict.fromkeys(("training", "evaluation", "interop", "selfcheck"), 6),
    "planner": 7,
}
# The doors and what configures them: everything lies below, and no package imports them.
DOORS = {
    "cli",
    "eval",
    "tune",
    "show_heads",
    "show_report",
    "show_targets",
    "train_door",
    "doctor",
    "plan",
    "launch",
    "processes",
    "config",
    "bindings",
    "configurables",
}
OPTIONAL = {"matplotlib", "datasets", "grain", "wandb", "tensorboardX"}


class Import(NamedTuple):
    module: str
    at_top: bool


def imports(source: str) -> Iterator[Import]:
    """The absolute modules that a source imports; `from a import b` counts as `a.b`."""
    tree = ast.parse(source)
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    inside = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, functions)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, id(node) not in inside)


def faults(path: str, source: str) -> list[str]:
    """What the imports of one source do that its place in the tree forbids."""
    parts = Path(path).with_suffix("").parts
    in_library = parts[0] == "specjax"
    package = parts[1] if in_library and len(parts) > 2 else ""
    found = []
    for module, at_top in imports(source):
        top, *rest = module.split(".")
        if top == "torch" and in_library:
            found.append(f"{path} imports torch")
        if top == "gin" and path != "specjax/config.py":
            found.append(f"{path} imports gin")
        if top in OPTIONAL and at_top and in_library:
            found.append(f"{path} imports {top} outside a function")
        if in_library and top in ("train", "eval", "scripts", "tests"):
            found.append(f"{path} imports {top}")
        if not package or top != "specjax" or not rest or rest[0] == package:
            continue
        if rest[0] in DOORS or (rest[0] in RANK and RANK[rest[0]] >= RANK[package]):
            found.append(f"{path} imports {module}")
    return found


def test_every_source_keeps_the_order() -> None:
    sources = [
        path.relative_to(ROOT).as_posix()
        for folder in ("specjax", "train", "eval", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert "specjax/config.py" in sources
    found = [fault for path in sources for fault in faults(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


def test_every_package_has_its_place() -> None:
    packages = {path.parent.name for path in (ROOT / "specjax").glob("*/__init__.py")}
    assert packages <= RANK.keys()
    modules = {path.stem for path in (ROOT / "specjax").glob("*.py")} - {"__init__"}
    assert modules <= DOORS


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("specjax/layers/a.py", "import torch"),
        ("specjax/layers/a.py", "def f():\n    import torch.nn"),
        ("specjax/cli.py", "from gin import config"),
        ("train/a.py", "import gin"),
        ("specjax/evaluation/a.py", "import matplotlib.pyplot as plt"),
        ("specjax/data/a.py", "try:\n    from datasets import Dataset\nexcept ImportError: pass"),
        ("specjax/core/a.py", "from specjax.layers import norm"),
        ("specjax/core/a.py", "from specjax import layers"),
        ("specjax/layers/b/a.py", "def f():\n    from specjax.targets.llama import x"),
        ("specjax/heads/a.py", "from specjax.verify import greedy"),
        ("specjax/io/a.py", "import specjax.layers.norm"),
        ("specjax/training/a.py", "from specjax.evaluation import runner"),
        ("specjax/decode/a.py", "from specjax.config import parse"),
        ("specjax/decode/a.py", "import scripts.x"),
    ],
)
def test_the_rule_bites(path: str, source: str) -> None:
    assert len(faults(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("specjax/evaluation/a.py", "def f():\n    import matplotlib.pyplot as plt"),
        ("specjax/decode/a.py", "from specjax import verify\nfrom specjax.decode.b import c"),
        ("specjax/targets/a.py", "from specjax.io import hf\nfrom specjax import __version__"),
        ("specjax/eval.py", "from specjax.evaluation import runner"),
        ("train/a.py", "from specjax.config import parse\nimport datasets"),
    ],
)
def test_the_rule_lets_through(path: str, source: str) -> None:
    assert faults(path, source) == []
