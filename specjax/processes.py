"""A command as one of several processes: the flags that say which, and `jax.distributed`.

Which process this is, is no setting of a run: the saved configuration replays on any number of
hosts. Nothing is guessed either: a command is on its own unless a flag says otherwise.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from specjax.core.errors import ConfigError

FLAGS = {
    "coordinator": "HOST:PORT of process 0, where a run has several processes",
    "processes": "how many it has",
    "process": "which of them this is, counted from 0",
    "cluster": "finds these three: auto, or one way of jax's: slurm, ompi, mpi4py, k8s",
}
"""Flags of commands that can be one of several processes, and what `--help` says of them."""

HEARTBEAT = 30
"""Seconds after which a process that is silent counts as lost."""
_LEAVE = 30  # seconds that a process waits for the others at its very end
_SAY = 2  # seconds that process 0 leaves them to say what is wrong
_MISTAKE = 2  # exit code of `cli.guarded` for an error of the user's


@dataclasses.dataclass(frozen=True)
class Member:
    """Which process of a run this is.

    Attributes:
        coordinator: HOST:PORT of process 0; "" leaves all three to `cluster`.
        processes: how many there are.
        process: which one this is.
        cluster: how jax finds them: "auto" or one of its names.
    """

    coordinator: str = ""
    processes: int = 0
    process: int = 0
    cluster: str = ""

    @property
    def flags(self) -> list[str]:
        """The words that say so on a command line, for one that has a coordinator."""
        given = dataclasses.asdict(self).items()
        return [f"--{name}={value}" for name, value in given if name != "cluster"]


def take(words: Sequence[str]) -> tuple[Member | None, list[str]]:
    """Take the flags out of a command line.

    Returns:
        (which process this is, None where nothing says that there are others; the other words).

    Raises:
        ConfigError: flags without a value, or that do not belong together.
    """
    given: dict[str, str] = {}
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if not flag.startswith("--") or (name := flag[2:]) not in FLAGS:
            kept.append(word)
            continue
        given[name] = text if equals else next(rest, "")
        if not given[name]:
            raise ConfigError(f"{flag} needs a value: {FLAGS[name]}")
    if not given:
        return None, kept
    if "cluster" in given:
        if len(given) > 1:
            raise ConfigError("--cluster finds the processes itself: give no flags beside it")
        return Member(cluster=given["cluster"]), kept
    if missing := [f"--{name}" for name in FLAGS if name not in given and name != "cluster"]:
        raise ConfigError(f"several processes need {', '.join(missing)} too, or --cluster alone")
    many, this = (_number(name, given[name]) for name in ("processes", "process"))
    if not 0 <= this < many:
        raise ConfigError(f"--process counts from 0 to below --processes {many}, got {this}")
    if ":" not in given["coordinator"]:
        raise ConfigError(f"--coordinator should read HOST:PORT, got {given['coordinator']!r}")
    return Member(given["coordinator"], many, this), kept


def join(member: Member) -> None:
    """Meet the other processes; before anything that uses a device.

    Raises:
        ConfigError: they cannot be found, or do not come.
    """
    import jax

    # It would keep SIGTERM from us; the trainer sees to it that all processes leave together.
    jax.config.update("jax_enable_preemption_service", False)
    method = {"": "deactivate", "auto": None}.get(member.cluster, member.cluster)
    try:
        jax.distributed.initialize(
            member.coordinator or None,
            member.processes or None,
            member.process if member.coordinator else None,
            cluster_detection_method=method,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=_LEAVE,
        )
    # Of what it is told, of clusters' interfaces, of the network.
    except (ValueError, TypeError, RuntimeError, OSError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        whom = f"at {member.coordinator}" if member.coordinator else f"by {member.cluster}"
        raise ConfigError(f"the processes of this run were not found {whom}: {reason}") from error


def together(run: Callable[[], int]) -> int:
    """Run a process of several to its end, the end of all.

    One that fails leaves at once: an orderly end would wait for the others, which wait for it.

    Args:
        run: the command; returns its exit code.
    """
    from specjax.core import hosts

    code = 1
    try:
        code = run()
        if code != _MISTAKE:
            hosts.wait("the end")
            return code
    except Exception:
        traceback.print_exc()
        print(
            "specjax: this process of several ends; if it lost another one, that is why",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if hosts.is_lead():
        # The others may be about to say the same, and end noisily where their coordinator is gone.
        time.sleep(_SAY)
    os._exit(code)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{name} must be a whole number, got {text!r}") from None
