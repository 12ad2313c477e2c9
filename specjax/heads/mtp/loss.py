"""Training MTP modules on texts: every step is a pass over the whole text, one token further on.

Step k feeds index t the state that step k - 1 handed on (step 0: the target's) and the text's token
x_{t+1+k}, and compares with x_{t+2+k}. Each step is a fresh causal pass over the same indices
0 .. S - K - 2 of K steps, with keys of its own (FastMTP, vllm-project/speculators). Step k runs
module k, or the last one again where there are fewer. The gradient flows back through the states
handed on; embedding and output layer are the target's and stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import ConfigError
from specjax.heads import objective
from specjax.heads.base import Borrowed, TrainBatch, refuse_packed
from specjax.heads.mtp.network import ModuleWeights, MtpWeights, carry, draft_logits, layer_input
from specjax.layers.context import Context
from specjax.layers.linear import capped, linear_f32
from specjax.layers.losses import masked_sum, overlap

if TYPE_CHECKING:
    from specjax.heads.mtp.head import MtpHead


@struct.dataclass
class Step:
    """What a step gives per index.

    Attributes:
        terms: loss terms by name, float32.
        right: the head's most probable token is the text's.
        counted: the label is supervised.
        accept: overlap with the target's distribution; None where no term needs that.
    """

    terms: dict[str, Float[Array, "B R"]]
    right: Bool[Array, "B R"]
    counted: Bool[Array, "B R"]
    accept: Float[Array, "B R"] | None


def forced_pass(
    head: MtpHead,
    module: ModuleWeights,
    borrowed: Borrowed,
    states: Float[Array, "B R H"],
    tokens: Int[Array, "B R"],
) -> Float[Array, "B R H"]:
    """Run a module over texts from their start, each index given its state and next token.

    Returns:
        The outputs before the last norm.
    """
    batch, length = tokens.shape
    start = jnp.zeros((batch,), jnp.int32)
    ctx = Context.of(start, jnp.full((batch,), length), length, head.layer.ropes)
    x = layer_input(head, module, borrowed, states, tokens, ctx.positions)
    return head.layer.run(module.layer, x, ctx, None, 0)[0]


def step_weights(steps: int, beta: float) -> list[float]:
    """Return each step's weight, `beta ** k` over the sum of them."""
    powers = [beta**k for k in range(steps)]
    return [power / sum(powers) for power in powers]


def unroll(
    head: MtpHead, params: MtpWeights, borrowed: Borrowed, batch: TrainBatch
) -> tuple[Step, ...]:
    """Run all steps.

    Raises:
        ConfigError: texts too short for so many steps.
    """
    config, length = head.config, batch.tokens.shape[1]
    window = length - config.steps - 1
    if window < 1:
        raise ConfigError(
            f"Mtp.steps {config.steps} needs texts of at least {config.steps + 2} tokens, these"
            f" have {length}"
        )
    at = jnp.arange(length)[None]
    supervised = (batch.loss_mask > 0) & (at < batch.lengths[:, None])

    def run(
        module: ModuleWeights, borrowed: Borrowed, states: jax.Array, part: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, Step]:
        tokens, labels, counted, hidden = part
        out = forced_pass(head, module, borrowed, states, tokens)
        return carry(head, module, out), _compare(
            head, module, borrowed, out, labels, counted, hidden
        )

    if config.remat:
        run = jax.checkpoint(run)
    states, steps = batch.hidden[:, :window], []
    for k in range(config.steps):
        here, label = slice(1 + k, 1 + k + window), slice(2 + k, 2 + k + window)
        # The state whose logits predict the label stands one before it.
        part = (
            batch.tokens[:, here],
            batch.tokens[:, label],
            supervised[:, label],
            batch.hidden[:, here],
        )
        module = params.modules[min(k, head.modules - 1)]
        states, step = run(module, borrowed, states, part)
        steps.append(step)
    return tuple(steps)


def _compare(
    head: MtpHead,
    module: ModuleWeights,
    borrowed: Borrowed,
    out: Float[Array, "B R H"],
    labels: Int[Array, "B R"],
    counted: Bool[Array, "B R"],
    hidden: Float[Array, "B R H"],
) -> Step:
    """Compare a step's outputs with the text and, where a term asks for it, with the target."""
    logits = draft_logits(head, module, borrowed, out)
    target = accept = None
    if objective.needs_teacher(head.config.objective):
        states = jax.lax.stop_gradient(hidden.astype(module.norm.dtype))
        target = capped(linear_f32(states, borrowed.output), head.softcap)
        accept = jax.lax.stop_gradient(overlap(logits, target))
    return Step(
        terms=objective.slot_terms(head.config.objective, logits, target, labels),
        right=jnp.argmax(logits, axis=-1) == labels,
        counted=counted,
        accept=accept,
    )


def training_loss(
    head: MtpHead, params: MtpWeights, borrowed: Borrowed, batch: TrainBatch
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Return (loss, metrics) of a batch.

    The metrics are scalars: `accuracy` (of step 0: how often the text's token is the head's best),
    `tau` (expected tokens of a greedy round on these texts, the bonus included), `counted`
    (labels of step 0), per step k `loss_k` and `accuracy_k`, and where the objective looks at the
    target's distribution `acceptance` and `acceptance_k`. Without supervised labels the loss is 0.
    """
    refuse_packed(batch, "Mtp")
    goal, steps = head.config.objective, unroll(head, params, borrowed, batch)
    mask = jnp.stack([step.counted for step in steps], axis=-1)
    terms = {
        name: jnp.stack([step.terms[name] for step in steps], axis=-1) for name in steps[0].terms
    }
    weights = objective.slot_weights(goal, jnp.arange(len(steps)), mask, terms)
    loss = jnp.zeros((), jnp.float32)
    metrics: dict[str, jax.Array] = {}
    for k, share in enumerate(step_weights(len(steps), head.config.beta)):
        own = {name: term[..., k] for name, term in terms.items()}
        value, _ = objective.total(goal, own, mask[..., k], weights[..., k])
        loss = loss + share * value
        count = jnp.maximum(jnp.sum(mask[..., k]), 1)
        metrics[f"loss_{k}"] = value
        metrics[f"accuracy_{k}"] = jnp.sum(steps[k].right & mask[..., k]) / count
        if (accept := steps[k].accept) is not None:
            metrics[f"acceptance_{k}"] = masked_sum(accept, mask[..., k]) / count
    reach = jnp.cumprod(jnp.stack([step.right for step in steps], axis=-1), axis=-1)
    first = jnp.maximum(jnp.sum(mask[..., 0]), 1)
    metrics["tau"] = 1.0 + masked_sum(reach.sum(-1).astype(jnp.float32), mask[..., 0]) / first
    metrics["counted"] = jnp.sum(mask[..., 0]).astype(jnp.float32)
    metrics |= {
        name[:-2]: metrics[name] for name in ("accuracy_0", "acceptance_0") if name in metrics
    }
    return loss, jax.lax.stop_gradient(metrics)
