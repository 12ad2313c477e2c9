"""Where the shipped configuration files are: in a checkout, or inside an installed package."""

import os
from pathlib import Path

from specjax.core.errors import ConfigError, nearest

_PACKAGE = Path(__file__).resolve().parents[1]


def configs_dir() -> Path:
    """The folder of shipped configurations.

    Returns:
      `configs/` beside the package in a checkout, `specjax/_configs/` in an install.

    Raises:
      ConfigError: if neither exists (a broken install).
    """
    checkout = _PACKAGE.parent / "configs"
    if (_PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    installed = _PACKAGE / "_configs"
    if installed.is_dir():
        return installed
    raise ConfigError(f"the shipped configurations are missing: no folder {installed}")


def find_config(name: str, near: Path | None = None, where: str = "") -> Path:
    """Find a configuration file by the name a user or an `include` gave it.

    Args:
      name: a path; relative ones are looked up in `near`, then in the shipped configurations.
      near: the folder to look in first; None means the working directory.
      where: what asked for it, to end the message with.

    Returns:
      The path of an existing file.

    Raises:
      ConfigError: if there is no such file; names the nearest shipped one.
    """
    path = Path(name).expanduser()
    shipped = configs_dir()
    candidates = [(near or Path()) / path, shipped / path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = (found.relative_to(shipped).as_posix() for found in sorted(shipped.rglob("*.gin")))
    place = f"in {shown(near)}" if near else "here"
    raise ConfigError(
        f"no configuration file {name!r} {place} or in {shown(shipped)}{where}"
        f"{nearest(name, names)}"
    )


def shown(path: Path) -> str:
    """A path as messages show it: relative to the working directory if it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
