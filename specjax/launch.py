"""Start a command as several processes on this machine and watch over them.

usage: specjax launch --processes N [--devices D] -- COMMAND [settings]

    specjax launch --processes 2 --devices 4 -- \\
        python train/eagle3.py --target DIR --data FILE --out DIR Mesh.data=8

Each process gets COMMAND and the flags --coordinator, --processes and --process; its lines of
output begin with its number. If one fails or is lost, the others are stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import NoReturn, TextIO

from specjax.cli import guarded
from specjax.core.errors import ConfigError
from specjax.processes import Member

GRACE = 10
"""Seconds from SIGTERM to SIGKILL."""
_LONGEST_LINE = 1 << 24


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"launch: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `specjax launch`.

    Returns:
        The exit code: 0 if all processes ended well, else that of the first which did not, 128 and
        the signal's number for one that a signal ended.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or "-h" in words[:1] or "--help" in words[:1]:
        print(__doc__)
        return 0

    def run() -> int:
        parser = _Parser(prog="specjax launch", add_help=False, allow_abbrev=False)
        parser.add_argument("--processes", type=int, required=True)
        parser.add_argument("--devices", type=int, default=0)
        parser.add_argument("command", nargs=argparse.REMAINDER)
        given = parser.parse_args(words)
        command = given.command[1:] if given.command[:1] == ["--"] else given.command
        if not command:
            raise ConfigError("launch: give the command after --")
        if given.processes < 1 or given.devices < 0:
            raise ConfigError("launch: --processes must be at least 1, --devices at least 0")
        return asyncio.run(_Launch(command, given.processes, given.devices).run())

    return guarded(run)


class _Launch:
    """The processes of one command."""

    def __init__(self, command: Sequence[str], processes: int, devices: int) -> None:
        self.command, self.processes = command, processes
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if devices:
            simulated = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
            self.environment |= simulated
        self.children: list[Process] = []
        self.asked = 0  # the signal that this process was sent

    async def run(self) -> int:
        """Start the processes and wait for their end."""
        coordinator = f"127.0.0.1:{_free_port()}"
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._pass_on, number)
        forwarding = []
        try:
            for index in range(self.processes):
                child = await self._start(Member(coordinator, self.processes, index))
                self.children.append(child)
                for pipe, out in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                    forwarding.append(asyncio.create_task(_forward(pipe, out, f"[{index}] ")))
            failed = await self._first_failure()
        finally:
            await self._stop()
        await asyncio.gather(*forwarding)
        if failed is None:
            return 0
        code = self.children[failed].returncode or 0
        if self.asked:
            self._say(f"all {self.processes} processes were stopped")
            return 128 + self.asked
        how = (
            f"was lost (killed by {signal.Signals(-code).name})"
            if code < 0
            else f"failed (exit code {code})"
        )
        others = "; the others were stopped" if self.processes > 1 else ""
        self._say(f"process {failed} of 0 to {self.processes - 1} {how}{others}")
        return 128 - code if code < 0 else code

    async def _start(self, member: Member) -> Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self.command,
                *member.flags,
                env=self.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                limit=_LONGEST_LINE,
                # A group of its own: a key pressed here shall reach it once, from us.
                start_new_session=True,
            )
        except OSError as error:
            reason = f"{self.command[0]!r} cannot be started ({error.strerror})"
            raise ConfigError(f"launch: {reason}") from None

    async def _first_failure(self) -> int | None:
        """Wait for the first process that does not end well; None if all do."""
        waiting = {asyncio.create_task(c.wait()): i for i, c in enumerate(self.children)}
        left = set(waiting)
        while left:
            ended, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            # One that was killed is why the others failed.
            failed = sorted((task.result(), waiting[task]) for task in ended if task.result())
            if failed and not self.asked:
                return failed[0][1]
        return next((i for i, child in enumerate(self.children) if child.returncode), None)

    async def _stop(self) -> None:
        """End what still runs."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [child for child in self.children if child.returncode is None]
            if not running:
                return
            self._signal(number)
            ends = [asyncio.create_task(child.wait()) for child in running]
            await asyncio.wait(ends, timeout=GRACE)

    def _pass_on(self, number: int) -> None:
        self.asked = number
        self._signal(number)

    def _signal(self, number: int) -> None:
        for child in self.children:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(child.pid, number)

    def _say(self, text: str) -> None:
        print(f"specjax launch: {text}", file=sys.stderr, flush=True)


async def _forward(pipe: asyncio.StreamReader | None, out: TextIO, prefix: str) -> None:
    assert pipe is not None
    while line := await pipe.readline():
        out.write(prefix + line.decode(errors="replace").rstrip("\n") + "\n")
        out.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
