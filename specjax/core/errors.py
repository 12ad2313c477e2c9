"""Errors that a user can cause: each is one clear line, which the command line prints as it is."""

import difflib
from collections.abc import Iterable


class SpecJaxError(Exception):
    """A mistake in what the user gave: the message says what, where, and what would be right."""


class ConfigError(SpecJaxError):
    """A command line, configuration file or configuration value that cannot be used."""


class CheckpointError(SpecJaxError):
    """Weights or a model directory that do not fit what was asked for."""


class RequestError(SpecJaxError):
    """A generation request that the engine cannot serve."""


class DataError(SpecJaxError):
    """A prompt or training file that cannot be read or holds what it should not."""


class PairingError(SpecJaxError):
    """A head and a target that do not belong together."""


class TrainingError(SpecJaxError):
    """A training run that cannot start or go on."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Words to append to a message about an unknown name.

    Args:
      name: what the user wrote.
      valid: the names that exist.

    Returns:
      "; did you mean 'x'?" for the closest valid name, "" when none is close. Case is ignored.
    """
    by_lower = {candidate.lower(): candidate for candidate in valid}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""
