"""The published-reference fixture, computed by the functions that `rejection` itself calls."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.layers.sampling import Sampling, overlap, processed_probs
from specjax.verify import contains_stop, cut_at_stop, greedy, tally
from specjax.verify.emit import prefix_length
from specjax.verify.rejection import accept_mask, accept_probability, next_distribution

FIXTURE = Path(__file__).parent.parent / "fixtures" / "verification"
TENSORS = load_file(FIXTURE / "expected.safetensors")
MANIFEST = json.loads((FIXTURE / "manifest.json").read_text())["expected_tensors"]
CASES = sorted({name.split(".")[0] for name in TENSORS})


@jax.jit
def compute(given):
    """All output tensors of one case from its inputs."""
    sampling = Sampling.of(1, given["temperature"])
    p = processed_probs(given["target_logits"][None], sampling)
    q = processed_probs(given["draft_logits"][None], sampling)
    drafts = given["draft_tokens"][None]
    width = jnp.full(1, drafts.shape[1])
    stops = jnp.asarray(given.get("stop_token_ids", ()), jnp.int32)
    probability = accept_probability(p, q, drafts)
    matched = prefix_length(accept_mask(probability, given["uniforms"][None], width))
    emitted = cut_at_stop(drafts, matched, stops, width + 1, jnp.zeros(1, bool))
    accepted, counted = tally(matched, width, emitted)
    out = {
        "target_probs": p,
        "draft_probs": q,
        "accept_prob": probability,
        "accepted": accepted,
        "next_distribution": next_distribution(p, q, drafts, accepted, width),
        "terminated_by_stop": contains_stop(drafts, matched, stops),
        "effective_proposal_length": counted,
        "expected_accept_rate": overlap(p[:, :-1], q),
    }
    return {name: value[0] for name, value in out.items()}


@pytest.mark.parametrize("case", CASES)
def test_fixture(case):
    """F51 is the case `stop_token`; every tensor marked as output is computed and compared."""
    role = {"input": {}, "output": {}}
    for name, value in TENSORS.items():
        if name.startswith(case + "."):
            role[MANIFEST[name]["role"]][name.split(".")[1]] = value
    got = compute(role["input"])
    assert got.keys() == role["output"].keys()
    for name, want in role["output"].items():
        assert got[name].dtype == want.dtype and got[name].shape == want.shape, name
        if want.dtype == np.float32:
            np.testing.assert_allclose(got[name], want, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(got[name], want, err_msg=name)


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("greedy")])
def test_greedy_path_agrees(case):
    """The greedy verdict is the same as the fixture's one-hot distributions give."""
    given = {n.split(".")[1]: v for n, v in TENSORS.items() if n.startswith(case + ".")}
    logits, drafts = (jnp.asarray(given[name])[None] for name in ("target_logits", "draft_tokens"))
    got = jax.jit(greedy)(logits, drafts, jnp.full(1, drafts.shape[1]))
    accepted = int(given["accepted"])
    assert int(got.accepted[0]) == accepted
    assert int(got.tokens[0, accepted]) == int(given["next_distribution"].argmax())
