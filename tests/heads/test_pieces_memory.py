"""F72: no loss makes logits of all positions over the whole vocabulary."""

import pytest

from scripts.bench_memory import KINDS, temporaries

VOCAB, LENGTH = 150_000, 2048


@pytest.mark.parametrize("kind", KINDS)
def test_f72_temporaries_stay_below_one_array_of_logits(kind: str) -> None:
    """Shapes only. A plain loss holds several arrays of this size at a time."""
    assert temporaries(kind, VOCAB, LENGTH) < 4 * VOCAB * LENGTH
