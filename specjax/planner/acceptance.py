"""How many drafts stand: rates by position, given or measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specjax.core.errors import ConfigError, DataError
from specjax.evaluation.records import RESULTS
from specjax.evaluation.records import read as read_records


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Acceptance by position.

    Attributes:
        rates: of draft 1, 2, ..., each over all rounds, so that none exceeds the one before.
        source: where they are from.
    """

    rates: tuple[float, ...]
    source: str

    def tokens(self, drafts: int) -> float:
        """Return the tokens that a round of `drafts` brings, the target's own included.

        Behind the last position known, a draft is as likely to stand, given those before it, as
        there.
        """
        known = self.rates[:drafts]
        before = self.rates[-2] if len(self.rates) > 1 else 1.0
        ratio = self.rates[-1] / before if before else 0.0
        tail = drafts - len(known)
        beyond = sum(self.rates[-1] * ratio ** (i + 1) for i in range(tail)) if tail > 0 else 0.0
        return 1.0 + sum(known) + beyond


def read(text: str, head: str) -> Acceptance | None:
    """Read `Plan.acceptance`.

    Args:
        text: rates by position, a results directory, or "" for none.
        head: the algorithm whose records are looked for.

    Raises:
        ConfigError: rates that cannot be.
        DataError: no such results, or none of this head.
    """
    if not text:
        return None
    words = text.strip("()[] ").replace(",", " ").split()
    try:
        rates = tuple(float(word) for word in words)
    except ValueError:
        return _from_results(Path(text).expanduser(), head)
    steady = all(a >= b for a, b in zip((1.0, *rates), (*rates, 0.0), strict=True))
    if not rates or not steady:
        raise ConfigError(
            f"Plan.acceptance {text!r}: rates are from 0 to 1, each at most the one before it"
        )
    return Acceptance(rates, "given")


def _from_results(path: Path, head: str) -> Acceptance:
    directory = path.parent if path.name == RESULTS else path
    rows = [
        row
        for row in read_records(directory)
        if row["head"] == head and row.get("acceptance_rate_per_position")
    ]
    if not rows:
        raise DataError(f"Plan.acceptance: no record of a {head} head that drafted in {directory}")
    row = max(rows, key=lambda row: row["num_speculative_tokens"])
    rates = tuple(rate or 0.0 for rate in row["acceptance_rate_per_position"])
    return Acceptance(
        rates,
        f"measured in {directory}: {row['prompts']} prompts of {row.get('prompts_source')},"
        f" temperature {row['temperature']:g}, K = {row['num_speculative_tokens']}",
    )
