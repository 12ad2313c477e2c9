"""The output layer in two stages: choose clusters of tokens, then score their tokens alone.

Each cluster has a centroid; the clusters' tokens are the rows of `token_ordering` cut into equal
parts. A token outside the chosen clusters cannot be drafted: its logit is -inf. Of a vocabulary of
262144 tokens in 2048 clusters, 32 clusters leave 4096 rows of the embedding to be read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.core.params import ParamSpec
from specjax.layers.embedding import lookup
from specjax.layers.linear import linear_f32

Weight = Any
_ROUNDS = 8  # of power iteration per cut
_SEEN = 4096  # tokens that decide how a set is cut


@struct.dataclass
class CentroidWeights:
    """The clusters.

    Attributes:
        centroids: `[C, Ha]`.
        ordering: `[V]` int32 token ids, cluster after cluster.
    """

    centroids: Weight
    ordering: Weight

    @classmethod
    def abstract(cls, clusters: int, vocab: int, hidden: int) -> CentroidWeights:
        """Return the specs with their published names."""
        prefix = "masked_embedding."
        return cls(
            centroids=ParamSpec((clusters, hidden), (None, "embed"), f"{prefix}centroids.weight"),
            ordering=ParamSpec((vocab,), (None,), f"{prefix}token_ordering", dtype="int32"),
        )


def clustered_logits(
    weights: CentroidWeights,
    embedding: Float[Array, "V H"],
    hidden: Float[Array, "B H"],
    top_k: int,
) -> Float[Array, "B V"]:
    """Return float32 logits, exact for the tokens of the `top_k` best clusters, else -inf.

    Args:
        weights: the clusters.
        embedding: the tied output layer.
        hidden: states after the final norm.
        top_k: clusters that are scored.
    """
    clusters, vocab = weights.centroids.shape[0], embedding.shape[0]
    _, best = jax.lax.top_k(linear_f32(hidden, weights.centroids), top_k)
    members = weights.ordering.reshape(clusters, vocab // clusters)[best]
    ids = members.reshape(hidden.shape[0], -1)
    rows = lookup(embedding, ids).astype(hidden.dtype)
    precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
    exact = jnp.einsum(
        "bh,bnh->bn", hidden, rows, precision=precision, preferred_element_type=jnp.float32
    )
    empty = jnp.full((hidden.shape[0], vocab), -jnp.inf, jnp.float32)
    return jax.vmap(lambda row, at, new: row.at[at].set(new))(empty, ids, exact)


def cluster_of(weights: CentroidWeights) -> Int[Array, " V"]:
    """Return the cluster of each token."""
    vocab, size = weights.ordering.shape[0], weights.ordering.shape[0] // weights.centroids.shape[0]
    at = jnp.arange(vocab, dtype=jnp.int32) // size
    return jnp.zeros((vocab,), jnp.int32).at[weights.ordering].set(at)


def cluster_tokens(
    embedding: Float[np.ndarray, "V H"], clusters: int
) -> tuple[Float[np.ndarray, "C H"], Int[np.ndarray, " V"]]:
    """Cluster tokens by their embeddings into clusters of one size.

    A set is cut in two, in proportion to the clusters each half shall become, along the direction
    in which it varies most; the halves likewise, down to single clusters.

    Args:
        embedding: float32, one row per token.
        clusters: how many C; V must be a multiple.

    Returns:
        (the clusters' means scaled to the length of an average row, token ids cluster by cluster,
        int32).
    """
    vocab = embedding.shape[0]
    size = vocab // clusters
    order = np.empty(vocab, np.int32)
    pending = [(np.arange(vocab, dtype=np.int32), 0, clusters)]
    while pending:
        ids, first, count = pending.pop()
        if count == 1:
            order[first * size : (first + 1) * size] = np.sort(ids)
            continue
        left = count // 2
        along = embedding[ids] @ _main_direction(embedding[ids])
        ranked = ids[np.argsort(along, kind="stable")]
        pending.append((ranked[: left * size], first, left))
        pending.append((ranked[left * size :], first + left, count - left))
    means = embedding[order].reshape(clusters, size, -1).mean(1)
    length = np.linalg.norm(embedding, axis=1).mean()
    means *= length / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-9)
    return means.astype(np.float32), order


def _main_direction(rows: np.ndarray) -> np.ndarray:
    """Return the direction in which rows vary most, found by power iteration on some of them."""
    some = rows[:: -(-len(rows) // _SEEN)]
    centred = some - some.mean(0)
    direction = centred[np.argmax((centred**2).sum(1))]
    for _ in range(_ROUNDS):
        direction = direction / max(float(np.linalg.norm(direction)), 1e-12)
        direction = centred.T @ (centred @ direction)
    return direction / max(float(np.linalg.norm(direction)), 1e-12)
