"""Settings of the plain drafters. Imports nothing heavy, so that `--help` is fast."""

import dataclasses

from specjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class NgramConfig:
    """Prompt lookup: how much of the text must repeat before it drafts.

    Attributes:
      longest: the text's last tokens that are looked for first.
      shortest: the fewest that count as a match.
    """

    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        """Refuse lengths that cannot be meant."""
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(
                f"Ngram.shortest {self.shortest} and Ngram.longest {self.longest}: need"
                " 1 <= shortest <= longest"
            )
