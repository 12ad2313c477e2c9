"""The command line: `specjax COMMAND ...`, and the frame that every command and script shares."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence

from specjax import __version__, config, configurables, processes
from specjax.core import paths
from specjax.core.errors import ConfigError, SpecJaxError, nearest

# name -> (where its `main(argv) -> exit code` is, what it does). Imported when called.
COMMANDS: dict[str, tuple[str, str]] = {
    "eval": ("specjax.eval:main", "measure decoding with and without a draft head"),
    "tune": ("specjax.tune:main", "find the best number of speculative tokens, and the schedule"),
    "launch": ("specjax.launch:main", "start a command as several processes on this machine"),
    "plan": ("specjax.plan:main", "what fits and what pays on a machine you do not have"),
    "doctor": ("specjax.doctor:main", "check platform, versions and numerics of this machine"),
    "report": ("specjax.show_report:main", "rebuild the report of a run, or compare runs"),
    "targets": ("specjax.show_targets:main", "list the production targets, or describe one"),
    "heads": ("specjax.show_heads:main", "list the released draft heads, or describe one"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      argv: the words after the program's name; None takes them from the process.

    Returns:
      The exit code: 0 done, 1 done in part, 2 a mistake in what the user gave, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] == "--version":
        print(f"specjax {__version__}")
        return 0
    return guarded(lambda: _command(words[0])(words[1:]))


def run_door(
    body: Callable[[config.Config], int | None],
    argv: Sequence[str] | None,
    *,
    usage: str,
    names: Sequence[str],
    short: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    default: str = "",
    rewrite: Callable[[Sequence[str]], Sequence[str]] = list,
    together: bool = False,
) -> int:
    """Run a command that takes a configuration: read it, run the body, report mistakes.

    Args:
      body: the command itself; it may return an exit code.
      argv: the words after the command's name; None takes them from the process.
      usage: what `--help` prints before the table of parameters.
      names: the configurables that `--help` lists.
      short: the short flags, see `config.parse`.
      flags: what `--help` says of flags that `rewrite` takes.
      default: the configuration file read when none is named.
      rewrite: turns the words into words that `config.parse` knows.
      together: whether several processes can run it, each started with `processes.FLAGS`.

    Returns:
      The exit code, as for `main`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "-h" in words or "--help" in words:
        joining = processes.FLAGS if together else {}
        _print_help(usage, names, short or {}, {**(flags or {}), **joining})
        return 0

    def run() -> int:
        member, rest = processes.take(words) if together else (None, words)
        settings = config.parse(rewrite(rest), short=short, default=default)
        if member is None:
            return body(settings) or 0
        processes.join(member)
        return processes.together(lambda: guarded(lambda: body(settings) or 0))

    return guarded(run)


def guarded(run: Callable[[], int]) -> int:
    """Call `run`; a user's mistake becomes one line on stderr and exit code 2."""
    try:
        return run()
    except SpecJaxError as error:
        message = " ".join(str(error).split())
        print(f"specjax: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specjax: interrupted", file=sys.stderr)
        return 130


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        raise ConfigError(
            f"no command {name!r}{nearest(name, COMMANDS)} (commands: {', '.join(COMMANDS)})"
        )
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)


def _usage() -> str:
    lines = ["usage: specjax COMMAND [settings]", "", "commands:"]
    lines += [f"  {name:<10} {doc}" for name, (_, doc) in COMMANDS.items()]
    lines += [
        "",
        "specjax COMMAND --help lists its settings; specjax --version prints the version.",
    ]
    return "\n".join(lines)


def _print_help(
    usage: str, names: Sequence[str], short: Mapping[str, str], flags: Mapping[str, str]
) -> None:
    from rich.console import Console
    from rich.table import Table

    print(usage.strip() + "\n")
    for flag, key in short.items():
        print(f"  --{flag:<12} short for {key}")
    for flag, what in flags.items():
        print(f"  --{flag:<12} {what}")
    print(
        "  --gin_file     a configuration file, looked up here, then in "
        + str(paths.shown(paths.configs_dir()))
    )
    print("  Name.x=value   sets a parameter below; later settings win\n")
    grid = Table(box=None, pad_edge=False, show_edge=False)
    grid.add_column("parameter", no_wrap=True)
    grid.add_column("type", overflow="fold", max_width=20)
    grid.add_column("default", overflow="fold", max_width=20)
    grid.add_column("what it is", overflow="fold", ratio=1)
    for row in configurables.table(names):
        nested = configurables.nested_name(row.annotation)
        if nested:
            default = f"{nested}.*"
        elif row.default is configurables.REQUIRED:
            default = "required"
        else:
            default = repr(row.default)
        grid.add_row(f"{row.configurable}.{row.name}", row.type, default, row.doc)
    console = Console(markup=False, highlight=False, emoji=False)
    console.width = max(console.width, 100)
    console.print(grid)


if __name__ == "__main__":
    sys.exit(main())
