from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.data.dataset import Position
from specjax.heads.base import borrow
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.targets.base import Target
from specjax.training import optim, step
from specjax.training.config import OptimConfig
from specjax.training.partition import Partition
from specjax.training.step import (
    Fixed,
    Steps,
    TrainState,
    features,
    new_state,
    nothing_gathered,
)
from tests.training.toy import VOCAB, ToyHead, make_batches, make_rows

Loaded = tuple[Target, Any]


class Wants(NamedTuple):
    """What a head declares, without the head."""

    taps: tuple[int, ...]
    reads: tuple[int, ...] = ()


def make(target: Loaded, head: Any = None, dtype: str = "float32") -> tuple[Steps, Fixed, Any]:
    """(compiled functions, fixed weights, function that makes a fresh state) of a toy run."""
    head = head or ToyHead()
    params = head.init()
    partition = Partition.of(params, head.trainable())
    trained, frozen = partition.split(params)
    rule = optim.optimizer(OptimConfig(lr=1e-2), 10)
    steps = Steps(target[0], head, partition, rule, compute_dtype=dtype)
    return steps, Fixed(frozen, target[1]), lambda: new_state(trained, rule)


def batch_of(lengths: tuple[int, ...], size: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    at = np.arange(size)[None]
    real = at < np.asarray(lengths)[:, None]
    return {
        "input_ids": np.where(real, rng.integers(3, 90, (len(lengths), size)), 0).astype(np.int32),
        "loss_mask": real & (at >= 2),
        "lengths": np.asarray(lengths, np.int32),
    }


def once(steps: Steps, state: TrainState, fixed: Fixed, batch: dict) -> tuple[TrainState, dict]:
    state, _, metrics = steps.train(state, None, fixed, batch, jnp.int32(0), last=True)
    return state, jax.device_get(metrics)


def test_learns_and_leaves_frozen_weights(target: Loaded) -> None:
    steps, fixed, fresh = make(target)
    before = jax.device_get(fixed)
    state = fresh()
    first = np.asarray(state.trained["['w']"])
    losses = []
    for _ in range(10):
        state, metrics = once(steps, state, fixed, batch_of((8, 6, 3, 8)))
        losses.append(metrics["loss"])
    assert losses[-1] < 0.9 * losses[0]
    assert np.abs(np.asarray(state.trained["['w']"]) - first).max() > 0
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(fixed))
    sizes = {leaf.size for leaf in jax.tree.leaves(state.optimizer)}
    assert sizes == {1, first.size}  # moments of the trained leaf alone


def test_bfloat16_compute_keeps_float32_masters(target: Loaded) -> None:
    steps, fixed, fresh = make(target, dtype="bfloat16")
    state, metrics = once(steps, fresh(), fixed, batch_of((8, 8)))
    exact, other, fresh32 = make(target)
    _, wanted = once(exact, fresh32(), other, batch_of((8, 8)))
    leaves = jax.tree.leaves((state.trained, state.optimizer))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert metrics["loss"] != wanted["loss"]  # it did compute in bfloat16
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=2e-2)


def test_non_finite_step_is_skipped_and_counted(target: Loaded) -> None:
    steps, fixed, fresh = make(target, ToyHead(poison=95))
    state, _ = once(steps, fresh(), fixed, batch_of((8, 8)))
    before = jax.device_get(state)
    bad = batch_of((8, 8), seed=1)
    bad["input_ids"][0, 3] = 95
    state, metrics = once(steps, state, fixed, bad)
    after = jax.device_get(state)
    assert np.isnan(metrics["loss"]) and int(after.skipped) == 1 and int(after.step) == 2
    jax.tree.map(
        np.testing.assert_array_equal,
        (before.trained, before.optimizer),
        (after.trained, after.optimizer),
    )
    state, metrics = once(steps, state, fixed, batch_of((8, 8), seed=2))
    assert np.isfinite(metrics["loss"]) and int(state.skipped) == 1


@pytest.mark.parametrize("kind", ["toy", "eagle3"])
def test_all_masked_batch_is_finite(target: Loaded, kind: str) -> None:
    batch = batch_of((8, 0))
    batch["loss_mask"][:] = False
    steps, fixed, fresh = make(target, None if kind == "toy" else Wrapped(target))
    state, metrics = once(steps, fresh(), fixed, batch)
    assert metrics["loss"] == 0 and metrics["gradient_norm"] == 0 and int(state.skipped) == 0


def test_accumulated_batches_equal_one(target: Loaded) -> None:
    steps, fixed, fresh = make(target)
    whole = batch_of((8, 3, 5, 8))
    parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in (0, 2)]
    assert parts[0]["loss_mask"].sum() != parts[1]["loss_mask"].sum()
    wanted, one = once(steps, fresh(), fixed, whole)
    state = fresh()
    gathered = nothing_gathered(state.trained)
    for i, part in enumerate(parts):
        # The same key for both, since the toy's noise scales the loss.
        state, gathered, many = steps.train(state, gathered, fixed, part, jnp.int32(0), last=i == 1)
    assert int(state.step) == 1
    np.testing.assert_allclose(many["gradient_norm"], one["gradient_norm"], rtol=1e-5)
    # AdamW's first step is lr times the gradient's sign, but for gradients next to nothing.
    np.testing.assert_allclose(state.trained["['w']"], wanted.trained["['w']"], atol=1e-4)
    assert float(jnp.abs(gathered.gradients["['w']"]).max()) == float(gathered.weight) == 0


def test_one_compilation_per_shape(target: Loaded) -> None:
    """F29: another length between two of the same neither compiles again nor changes a thing."""
    steps, fixed, fresh = make(target)
    ToyHead.traces.clear()
    state, losses = fresh(), []
    for size in (8, 16, 8, 16, 8):
        _, metrics = once(steps, fresh(), fixed, batch_of((5, 8), size))
        state, _ = once(steps, state, fixed, batch_of((5, 8), size))
        losses.append(metrics["loss"])
    assert sorted(ToyHead.traces) == [(2, 8), (2, 16)]
    assert losses[0] == losses[2] == losses[4] and losses[1] == losses[3]


class Wrapped:
    """An EAGLE-3 head over the toy target, as `make` wants one."""

    def __init__(self, target: Loaded, length: int = 2, **changes: Any) -> None:
        config = Eagle3Config(taps=(1, 2, 3), ttt_length=length, mask_shift=2, **changes)
        self._borrowed = borrow(*target)
        self._head = Eagle3Head.for_target(target[0].info, target[0].info.draft_block, config, 40)
        self.taps, self.reads = self._head.taps, self._head.reads
        self.trainable, self.loss = self._head.trainable, self._head.loss

    def init(self) -> Any:
        return self._head.init(jax.random.key(0), self._borrowed, np.arange(10, 50))


def test_gradient_reaches_exactly_the_answer(target: Loaded) -> None:
    """F17: prompt of 4 tokens, answer of 3: rows whose predicted token is an answer token."""
    head = Wrapped(target, length=1, in_vocab_only=False)
    batch = batch_of((7, 7), size=10)
    batch["loss_mask"] = np.broadcast_to((np.arange(10) >= 4) & (np.arange(10) < 7), (2, 10))
    found = features(*target, head, batch, jax.random.key(0))
    params = head.init()

    def loss(hidden: jax.Array) -> jax.Array:
        return head.loss(params, borrow(*target), found.replace(hidden=hidden))[0]

    # A row is trained if another teacher there changes the loss: all of them at once.
    moved = jnp.stack([found.hidden, *(found.hidden.at[0, r].multiply(-3.0) for r in range(10))])
    values = np.asarray(jax.jit(jax.vmap(loss))(moved))
    trained = np.flatnonzero(np.abs(values[1:] - values[0]) > 1e-6 * values[0]).tolist()
    # The state of position t is the teacher of token t + 1: positions 3, 4, 5 predict 4, 5, 6.
    assert trained == [3, 4, 5]


def test_features_do_not_depend_on_neighbours(target: Loaded) -> None:
    """F15: prompts of 5, 11 and 3 tokens in a batch, twice, and one by one."""
    batch = batch_of((5, 11, 3), size=16)
    jitted = jax.jit(lambda p, b: features(target[0], p, Wants((1, 4)), b, jax.random.key(0)))
    runs = [jitted(target[1], batch) for _ in range(2)]
    for b, n in enumerate((5, 11, 3)):
        alone = {
            "input_ids": batch["input_ids"][b : b + 1, :n],
            "loss_mask": batch["loss_mask"][b : b + 1, :n],
            "lengths": np.asarray([n], np.int32),
        }
        wanted = jitted(target[1], alone)
        for run in runs:
            pairs = [(run.hidden[b, :n], wanted.hidden[0]), (run.taps[:, b, :n], wanted.taps[:, 0])]
            for found, states in pairs:
                atol = 1e-6 * float(jnp.abs(states).max())  # float32 at the states' own size
                np.testing.assert_allclose(found, states, rtol=0, atol=atol)


def test_teacher_is_the_target(target: Loaded) -> None:
    """F1: logits of captured features are the target's own, in a target of 4 layers."""
    model, params = target
    batch = batch_of((9, 6), size=9)
    found = jax.jit(lambda b: features(model, params, Wants((1,)), b, jax.random.key(0)))(batch)
    teacher = found.hidden @ borrow(model, params).output.T

    @jax.jit
    def decode(cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        out = model.forward(params, tokens, None, cache)
        cache = model.commit(cache, out.update, jnp.ones(2, jnp.int32))
        return cache, model.logits(params, out.hidden)[:, 0]

    cache = model.init_cache(2, 16)
    for t in range(9):  # token by token through the cache: another path to the same logits
        cache, logits = decode(cache, batch["input_ids"][:, t : t + 1])
        for b in range(2):
            if t < batch["lengths"][b]:
                np.testing.assert_allclose(teacher[b, t], logits[b], atol=1e-5)
    assert teacher.shape == (2, 9, VOCAB)


def test_data_order_is_a_function_of_seed_and_epoch() -> None:
    rows = make_rows()
    orders = [[b["input_ids"].tolist() for b, _ in make_batches(rows).iterate(epochs=2)]] * 2
    assert orders[0] == orders[1] and orders[0][0] != orders[0][len(orders[0]) // 2]


def test_noise_stays_within_its_size() -> None:
    taps = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 64)) * 5, jnp.float32)
    noisy = step._noisy(taps, 0.2, jax.random.key(0))
    size = np.sqrt(np.square(taps).mean(-1, keepdims=True))
    share = np.asarray(noisy - taps) / size
    assert 0.19 < share.max() <= 0.2 and -0.2 <= share.min() < -0.19
    assert abs(share.mean()) < 0.01


@pytest.mark.parametrize("ema", [0.0, 0.15])
def test_average_of_the_weights(target: tuple[Target, Any], ema: float) -> None:
    """The average follows its recursion; noise moves the training loss but not the evaluation."""
    model, weights = target
    head = ToyHead()
    params = head.init()
    partition = Partition.of(params, head.trainable())
    trained, frozen = partition.split(params)
    fixed = Fixed(frozen=frozen, target=weights)
    rule = optax.sgd(0.1)
    batch = make_batches().batch(Position())
    state = new_state(trained, rule, averaged=ema > 0)
    plain = Steps(model, head, partition, rule)
    noisy = Steps(model, head, partition, rule, noise=0.5, ema=ema)
    (w,) = trained
    want = np.asarray(trained[w])
    for done in range(1, 4):
        state, *_ = noisy.train(state, None, fixed, batch, jnp.int32(0), last=True)
        decay = min(ema, (1 + done) / (10 + done))
        want = decay * want + (1 - decay) * np.asarray(state.trained[w])
    assert (state.average is None) == (ema == 0)
    np.testing.assert_allclose(state.result[w], want, rtol=1e-6, atol=1e-7)
    again = new_state(trained, rule)
    *_, quiet = plain.train(again, None, fixed, batch, jnp.int32(0), last=True)
    *_, loud = noisy.train(
        new_state(trained, rule, ema > 0), None, fixed, batch, jnp.int32(0), last=True
    )
    assert abs(float(quiet["loss"] - loud["loss"])) > 1e-4
    bare = state.replace(trained=state.result, average=None)
    np.testing.assert_allclose(
        noisy.evaluate(state, fixed, batch)["loss"],
        plain.evaluate(bare, fixed, batch)["loss"],
        rtol=1e-6,
    )
