"""Draft vocabularies: a head that drafts part of the target's tokens, and how ids translate.

`d2t` holds offsets, target id minus draft id; `t2d` marks the target ids that can be drafted. A
head without them drafts any token. Weights that have a vocabulary have the fields `embedding`,
`output`, `d2t` and `t2d`, None for what they lack.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax.core.errors import PairingError
from specjax.core.params import init_params
from specjax.heads.base import Borrowed

Weights = Any


def vocabulary_maps(
    kept: np.ndarray, vocab: int, draft_vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (d2t `[Vd]` int32 offsets, t2d `[V]` bool) of ascending target ids.

    Raises:
        PairingError: not `draft_vocab` ascending ids of the vocabulary.
    """
    kept = np.asarray(kept)
    fits = kept.shape == (draft_vocab,) and np.issubdtype(kept.dtype, np.integer)
    if not fits or np.any(np.diff(kept) <= 0) or kept[0] < 0 or kept[-1] >= vocab:
        raise PairingError(f"a draft vocabulary must be {draft_vocab} ascending ids below {vocab}")
    t2d = np.zeros(vocab, bool)
    t2d[kept] = True
    return (kept - np.arange(draft_vocab)).astype(np.int32), t2d


def check_maps(d2t: Int[Array, " Vd"], t2d: Bool[Array, " V"], where: str) -> None:
    """Refuse maps that are not two views of one choice of ids.

    Raises:
        PairingError: naming what contradicts what.
    """
    offsets, kept = (np.asarray(jax.device_get(x)) for x in (d2t, t2d))
    try:
        ids = offsets + np.arange(len(offsets))
        _, expected = vocabulary_maps(ids, len(kept), len(offsets))
    except PairingError as error:
        raise PairingError(f"{where}: d2t is no map ({error})") from None
    if not np.array_equal(expected, kept):
        raise PairingError(f"{where}: d2t and t2d choose different tokens")


def kept_ids(params: Weights) -> Int[Array, " Vd"] | None:
    """Return the target id of each draft id, None where both are the same."""
    if params.d2t is None:
        return None
    return jnp.arange(params.d2t.shape[0], dtype=jnp.int32) + params.d2t


def init_over(
    specs: Weights,
    key: jax.Array,
    borrowed: Borrowed,
    kept: Int[np.ndarray, " Vd"] | None = None,
    dtype: str = "float32",
) -> Weights:
    """Draw fresh weights; embedding and output layer, where there are any, are the target's rows.

    Args:
        specs: the head's weight table.
        key: PRNG key.
        borrowed: the target's embedding and output layer.
        kept: ascending target ids of the draft vocabulary, where the table has maps.
        dtype: of the weights.

    Raises:
        PairingError: `kept` is missing, superfluous, or not as many ascending ids as there are
            draft ids.
    """
    mapped = specs.d2t is not None
    if (kept is not None) != mapped:
        need = "needs" if mapped else "has no use for"
        raise PairingError(f"this head {need} a draft vocabulary")
    bare = dataclasses.replace(specs, embedding=None, output=None, d2t=None, t2d=None)
    rows: np.ndarray | slice = slice(None)
    maps: dict[str, jax.Array] = {}
    if kept is not None:
        d2t, t2d = vocabulary_maps(kept, specs.t2d.shape[0], specs.d2t.shape[0])
        maps, rows = {"d2t": jnp.asarray(d2t), "t2d": jnp.asarray(t2d)}, np.asarray(kept)
    return dataclasses.replace(
        init_params(bare, key, dtype),
        embedding=None if specs.embedding is None else jnp.array(borrowed.embedding, dtype),
        output=None if specs.output is None else jnp.array(borrowed.output[rows], dtype),
        **maps,
    )
