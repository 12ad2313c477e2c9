from pathlib import Path

import pytest

from specjax.core import paths
from specjax.core.errors import ConfigError


def test_checkout_and_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "specjax"
    (package / "_configs").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(paths, "_PACKAGE", package)
    # A folder `configs` beside an installed package is somebody else's.
    assert paths.configs_dir() == package / "_configs"
    (tmp_path / "pyproject.toml").touch()
    assert paths.configs_dir() == tmp_path / "configs"
    (tmp_path / "configs").rmdir()
    (package / "_configs").rmdir()
    with pytest.raises(ConfigError, match="the shipped configurations are missing"):
        paths.configs_dir()


def test_find_config_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = paths.configs_dir() / "eval" / "default.gin"
    assert paths.find_config("eval/default.gin") == shipped
    own = tmp_path / "eval" / "default.gin"
    own.parent.mkdir()
    own.touch()
    assert paths.find_config("eval/default.gin").resolve() == own.resolve()
    assert paths.find_config("default.gin", near=own.parent) == own
    assert paths.find_config(str(own)) == own
    with pytest.raises(ConfigError, match=r"'no\.gin' in eval or in .*, included by x"):
        paths.find_config("no.gin", near=own.parent, where=", included by x")


def test_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.shown(tmp_path / "a" / "b") == "a/b"
    assert paths.shown(tmp_path.parent / "c") == str(tmp_path.parent / "c")
