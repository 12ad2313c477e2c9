"""What the repository may hold: small files, and no paths of one machine."""

import re
import subprocess
from pathlib import Path

import pytest

from specjax.config import parse
from specjax.core.paths import configs_dir

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
CONFIGS = sorted(configs_dir().rglob("*.gin"))
# Spelt in parts, or this file would find itself.
MACHINE_PATH = re.compile(
    rb"(?<![\w.:/])/(?:" + b"|".join((b"work", b"root", b"tmp", b"home")) + b")/"
)


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files of the checkout that git holds or would add."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_sizes(tracked: list[Path]) -> None:
    sizes = {path: path.stat().st_size for path in tracked}
    assert sum(sizes.values()) < 42 * MIB
    fixtures = ROOT / "tests" / "fixtures"
    assert sum(size for path, size in sizes.items() if fixtures in path.parents) < 6 * MIB


def test_no_machine_paths(tracked: list[Path]) -> None:
    found = []
    for path in tracked:
        content = path.read_bytes()
        if b"\0" in content[:4096]:
            continue  # not text
        for number, line in enumerate(content.splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert not found, found


def test_machine_paths_are_recognised() -> None:
    folder = b"/" + b"root" + b"/"
    assert MACHINE_PATH.search(b"see " + folder + b"x")
    assert MACHINE_PATH.search(b'"' + folder + b'x"')
    assert not MACHINE_PATH.search(b"https://example.org" + folder + b"x")
    assert not MACHINE_PATH.search(b"data" + folder + b"x")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_sound(path: Path) -> None:
    header = path.read_text().split("\n\n")[0]
    assert header.startswith("# ")
    assert "# Command: " in header
    parse([f"--gin_file={path}"])  # every name exists and every value has its type
