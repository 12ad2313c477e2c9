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
from specjax.heads import objective, reach
from specjax.heads.base import Borrowed, TrainBatch
from specjax.heads.mtp.network import ModuleWeights, MtpWeights, carry, draft_logits, layer_input
from specjax.heads.pieces import in_pieces
from specjax.layers.context import Context
from specjax.layers.documents import Documents
from specjax.layers.linear import capped, linear_f32
from specjax.layers.losses import masked_sum

if TYPE_CHECKING:
    from specjax.heads.mtp.head import MtpHead


@struct.dataclass
class Step:
    """What a step gives per index.

    Attributes:
        terms: loss terms by name, float32; where not counted, anything.
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
    documents: Documents | None = None,
) -> Float[Array, "B R H"]:
    """Run a module over texts from their start, each index given its state and next token.

    Args:
        head: what it is.
        module: the module's weights.
        borrowed: the target's embedding and output layer.
        states: of the target, or handed on by the step before.
        tokens: the one after each state's.
        documents: the texts of each row, None where it is one.

    Returns:
        The outputs before the last norm.
    """
    batch, length = tokens.shape
    start, ropes = jnp.zeros((batch,), jnp.int32), head.layer.ropes
    ctx = Context.of(
        start,
        jnp.full((batch,), length),
        length,
        ropes,
        documents=documents,
        layout=borrowed.layout,
    )
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
    texts = None
    if batch.documents is not None and batch.positions is not None:
        texts = Documents(batch.documents[:, :window], batch.positions[:, :window])

    def run(
        module: ModuleWeights, borrowed: Borrowed, states: jax.Array, part: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, Step]:
        tokens, labels, counted, hidden = part
        out = forced_pass(head, module, borrowed, states, tokens, texts)
        return carry(head, module, out), _compare(
            head, module, borrowed, out, labels, counted, hidden
        )

    if config.remat:
        run = jax.checkpoint(run)
    states, steps = batch.hidden[:, :window], []
    for k in range(config.steps):
        here, label = slice(1 + k, 1 + k + window), slice(2 + k, 2 + k + window)
        counted = supervised[:, label]
        if batch.documents is not None:
            counted = counted & (batch.documents[:, label] == batch.documents[:, :window])
        # The state whose logits predict the label stands one before it.
        part = (
            batch.tokens[:, here],
            batch.tokens[:, label],
            counted,
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
    """Compare a step's outputs with the text and, where a term asks for it, with the target.

    A piece of the indices at a time, so that their logits never exist all at once.
    """
    rule = head.config.objective
    hidden = jax.lax.stop_gradient(hidden.astype(module.norm.dtype))

    def one(parts: tuple[jax.Array, ...]) -> objective.Slots:
        y, state, label = parts
        logits, target = draft_logits(head, module, borrowed, y), None
        if objective.needs_teacher(rule):
            target = capped(linear_f32(state, borrowed.output), head.softcap)
        return objective.compare(rule, logits, target, label)

    slots = in_pieces(one, (out, hidden, labels), counted, borrowed.output.shape[0])
    return Step(slots.terms, slots.pred == labels, counted, slots.accept)


def training_loss(
    head: MtpHead, params: MtpWeights, borrowed: Borrowed, batch: TrainBatch
) -> tuple[Float[Array, ""], dict[str, jax.Array]]:
    """Return (loss, metrics) of a batch.

    The metrics are `accuracy` (of step 0: how often the text's token is the head's best), those of
    `heads.reach`, `counted` (labels of step 0), per step k `loss_k` and `accuracy_k`, and where
    the objective looks at the target's distribution `acceptance` and `acceptance_k`. Without
    supervised labels the loss is 0.
    """
    goal, steps = head.config.objective, unroll(head, params, borrowed, batch)
    mask = jnp.stack([step.counted for step in steps], axis=-1)
    terms = {
        name: jnp.stack([step.terms[name] for step in steps], axis=-1) for name in steps[0].terms
    }
    shares = step_weights(len(steps), head.config.beta)
    loss, values, _ = objective.over_steps(goal, terms, mask, shares)
    metrics: dict[str, jax.Array] = {}
    for k, value in enumerate(values):
        count = jnp.maximum(jnp.sum(mask[..., k]), 1)
        metrics[f"loss_{k}"] = value
        metrics[f"accuracy_{k}"] = jnp.sum(steps[k].right & mask[..., k]) / count
        if (accept := steps[k].accept) is not None:
            metrics[f"acceptance_{k}"] = masked_sum(accept, mask[..., k]) / count
    right = jnp.stack([step.right for step in steps], axis=-1)
    known = [step.accept for step in steps if step.accept is not None]
    metrics |= reach.metrics(right, jnp.stack(known, axis=-1) if known else None, mask)
    metrics["counted"] = jnp.sum(mask[..., 0]).astype(jnp.float32)
    metrics |= {
        name[:-2]: metrics[name] for name in ("accuracy_0", "acceptance_0") if name in metrics
    }
    return loss, jax.lax.stop_gradient(metrics)
