"""Configuration: gin files and command lines, with a word for every mistake.

Gin reads the language (bindings, blocks, scopes, macros, references, includes). This module is the
only one that imports it; `specjax.bindings` gives each setting its meaning and refuses what plain
gin lets pass: values of the wrong type, names that do not exist, macros, scopes and bindings that
nothing uses. A `Config` holds one parsed command line; there is no global state.

    config = parse(["Eval.repeats=5"], short={"target": "Eval.target"})
    evaluation = config.build("Eval")
    config.check_all_used()
    config.save(folder / "config.gin")    # replays the run: --gin_file=folder/config.gin
"""

import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gin import config_parser

from specjax.bindings import Binding, Config, Macro, Reference
from specjax.configurables import register, table
from specjax.core.errors import ConfigError, nearest
from specjax.core.paths import configs_dir, find_config, shown

__all__ = ["Config", "configs_dir", "find_config", "parse", "register", "table"]

_KEY = re.compile(r"(?:\w+/)*\w+(?:\.\w+)*")
_SHELL = "on the command line"


class _Values(config_parser.ParserDelegate):
    """What gin's parser makes of references and macros."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Macro:
        return Macro(macro_name)


def parse(
    argv: Sequence[str], *, short: Mapping[str, str] | None = None, default: str = ""
) -> Config:
    """Read a command line and the files it names.

    Args:
      argv: `--gin_file=F` (repeatable; files come before all other settings), `Eval.repeats=5` or
        `--gin.Eval.repeats=5`, and the short flags; a later setting wins.
      short: the short flags, such as {"target": "Eval.target"} for `--target X`.
      default: the file to read when `argv` names none.

    Returns:
      A `Config`, its names and types already checked.

    Raises:
      ConfigError: for anything that cannot be meant.
    """
    files, settings = _split(argv, short or {})
    bindings: list[Binding] = []
    for name in files or ([default] if default else []):
        bindings += _read_file(find_config(name), ())
    bindings += [_read_setting(key, text) for key, text in settings]
    return Config(bindings)


def _split(
    argv: Sequence[str], short: Mapping[str, str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Sort a command line into files and (key, text) settings."""
    files: list[str] = []
    settings: list[tuple[str, str]] = []
    flags = ("gin_file", *short)
    words = iter(argv)
    for word in words:
        if not word.startswith("-"):
            key, equals, text = word.partition("=")
            if not equals:
                raise ConfigError(
                    f"unexpected argument {word!r}: settings are written Name.parameter=value"
                )
            settings.append((key, text))
            continue
        flag, equals, text = word.removeprefix("--").partition("=")
        if not (flag in flags or flag.startswith("gin.")):
            hint = nearest(flag, flags) or f"; flags are --{', --'.join(flags)}"
            raise ConfigError(f"unknown flag {word.partition('=')[0]}{hint}")
        if not equals:
            text = _next_value(flag, words)
        if flag == "gin_file":
            files.append(text)
        else:
            settings.append((short.get(flag) or flag.removeprefix("gin."), text))
    return files, settings


def _next_value(flag: str, words: Iterator[str]) -> str:
    text = next(words, None)
    if text is None or text.startswith("--"):
        raise ConfigError(f"--{flag} needs a value")
    return text


def _read_setting(key: str, text: str) -> Binding:
    """One `key=text` of a command line; text that is no literal is a string."""
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{key!r} {_SHELL} is no name: settings are written Name.parameter=value")
    try:
        parser = config_parser.ConfigParser(text, _Values())
        value = parser.parse_value()
        if parser.current_token.type not in (tokenize.NEWLINE, tokenize.ENDMARKER):
            value = text
    except (SyntaxError, tokenize.TokenError):
        value = text
    scope, selector, argument = config_parser.parse_binding_key(key)
    return _binding(scope, selector, argument, value, _SHELL, text)


def _binding(
    scope: str, selector: str, argument: str, value: object, where: str, text: str | None = None
) -> Binding:
    """A binding from gin's terms; a selector without argument is a macro."""
    name, parameter = (selector, argument) if argument else ("", selector)
    return Binding(scope, name, parameter, value, where, text)


def _read_file(path: Path, above: tuple[Path, ...]) -> list[Binding]:
    """The bindings of a file and its includes, in order."""
    if path.resolve() in above:
        raise ConfigError(f"{shown(path)} includes itself")
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {shown(path)}: {error}") from error
    bindings: list[Binding] = []
    try:
        for statement in config_parser.ConfigParser(source, _Values()):
            where = f"in {shown(path)}:{statement.location.line_num}"
            if isinstance(statement, config_parser.IncludeStatement):
                included = find_config(statement.filename, path.parent, f", included {where}")
                bindings += _read_file(included, (*above, path.resolve()))
            elif isinstance(statement, config_parser.ImportStatement):
                raise ConfigError(f"imports are not needed {where}: every configurable is known")
            elif isinstance(statement, config_parser.BindingStatement):
                scope, selector, argument, value, _ = statement
                bindings.append(_binding(scope, selector, argument, value, where))
    except (SyntaxError, tokenize.TokenError) as error:
        raise _syntax_error(error, path, source) from error
    return bindings


def _syntax_error(error: Exception, path: Path, source: str) -> ConfigError:
    """Gin's complaint in one line, with the line it is about."""
    place = error.args[1] if len(error.args) > 1 else (1, 0)
    number = place[0] if isinstance(error, tokenize.TokenError) else place[1]
    lines = source.splitlines() or [""]
    number = min(number, len(lines))
    message = str(error.args[0])
    bare = re.search(r"Failed to parse token '(.*)'", message)
    what = f"text needs quotes: {bare[1]!r}" if bare else message.splitlines()[0].rstrip(".")
    return ConfigError(
        f"cannot read {lines[number - 1].strip()!r} in {shown(path)}:{number}: {what}"
    )
