"""The fixture checker: what it computes with, what it says, and how it fails."""

import ast
import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from scripts import check_fixture
from scripts.fixture_checks import eagle3, losses, targets, verification
from scripts.fixture_checks.compare import judge
from specjax.decode import engine
from specjax.decode import round as engine_round
from specjax.heads import objective
from specjax.heads.eagle3 import loss as eagle3_loss
from specjax.verify import rejection

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
TARGET_INPUTS = ("input_ids", "padded_input_ids", "attention_mask", "greedy_prompt")
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen3", "eagle3_llama", "eagle3_qwen3", "eagle3_speculators")
]


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function: arguments to (exit code, what was printed, what was written)."""

    def call(directory, *flags):
        out = tmp_path / "out.safetensors"
        code = check_fixture.main([str(directory), "--output", str(out), *flags])
        said = capsys.readouterr()
        return code, said.out + said.err, load_file(out) if out.exists() else None

    return call


@pytest.fixture
def copy(tmp_path):
    """Return a function: a fixture's name and a change of its tensors to a copy's directory."""

    def make(name, change=lambda tensors: tensors, manifest=True):
        root = tmp_path / "fixtures" / name
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(FIXTURES / name, root)
        stored = root / "expected.safetensors"
        save_file(change(load_file(stored)), stored)
        if not manifest:
            (root / "manifest.json").unlink(missing_ok=True)
        return root

    return make


def is_input(name):
    """Return the function that says whether a tensor of a fixture is an input."""
    file = FIXTURES / name / "manifest.json"
    if not file.exists():
        return TARGET_INPUTS.__contains__
    tensors = json.loads(file.read_text())["expected_tensors"]
    return lambda tensor: tensors[tensor]["role"] == "input"


def inputs_only(name):
    given = is_input(name)
    return lambda tensors: {k: v for k, v in tensors.items() if given(k)}


@pytest.mark.parametrize("name", ["llama", "verification", "losses", *SLOW])
def test_every_tensor_is_computed_without_seeing_what_is_expected(run, copy, name):
    """Inputs alone are given; what comes back is what the reference stored."""
    code, said, got = run(copy(name, inputs_only(name)), "--strict")
    assert code == 0 and "FAILS" not in said and " 0 compared" in said
    given = is_input(name)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    outputs = [k for k in expected if not given(k)]
    assert outputs
    for tensor in outputs:
        ties = None
        if name == "losses" and tensor.endswith(".grad"):
            ties = np.zeros(expected[tensor].shape, bool)
            ties[:, 3] = True  # p = q there: the gradient of a minimum is a matter of choice
        line = judge(tensor, got[tensor], expected[tensor], ties)
        assert not line.failed, line
        assert got[tensor].dtype.kind == expected[tensor].dtype.kind


def test_agreement_and_disagreement(run, copy):
    code, said, _ = run(FIXTURES / "verification", "--strict")
    assert code == 0 and "80 computed, 80 compared, 0 differ, 0 not computed" in said

    def spoil(tensors):
        tensors["sample1.accept_prob"][2] += 1e-3
        tensors["greedy_all.accepted"][...] -= 1
        return tensors

    code, said, _ = run(copy("verification", spoil))
    assert code == 1 and "80 compared, 2 differ" in said
    assert [line.split()[1] for line in said.splitlines() if "FAILS" in line] == [
        "sample1.accept_prob",
        "greedy_all.accepted",
    ]


@pytest.mark.parametrize("name", ["verification", "losses"])
def test_without_a_manifest_the_kind_is_told_from_the_tensors(run, copy, name):
    code, said, _ = run(copy(name, manifest=False), "--strict")
    assert code == 0 and " 0 differ, 0 not computed" in said


def test_drafting_of_an_eagle3_fixture(run, copy):
    """The two decode rounds alone, which compile quickly; training is in the slow run."""
    code, said, got = run(
        copy("eagle3_llama", lambda t: {k: v for k, v in t.items() if k.startswith("infer.")})
    )
    assert code == 0 and "8 compared, 0 differ, 80 not computed" in said
    assert {"infer.round1.tokens", "infer.round2.logits"} <= set(got)


def test_what_is_not_built_is_listed_and_fails_only_if_strict(run, copy):
    root = copy("llama", lambda t: {**t, "mtp.hidden": np.zeros(3, np.float32)})
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    code, said, _ = run(root)
    assert code == 0 and "not computed: model_type 'mamba' is not built here" in said
    assert run(root, "--strict")[0] == 1
    (root / "manifest.json").write_text(json.dumps({"algorithm": "medusa"}))
    code, said, _ = run(root)
    assert code == 0 and "not computed: 'medusa' is not built here" in said


def test_an_unknown_tensor_of_a_known_kind(run, copy):
    root = copy("losses", lambda t: {**t, "reduced.hinge.none": np.zeros((), np.float32)})
    code, said, _ = run(root)
    assert code == 0 and "35 compared, 0 differ, 1 not computed" in said
    assert run(root, "--strict")[0] == 1


def test_hyper_parameters_come_from_the_manifest(run, copy):
    """With another gamma in the manifest the weights that gamma shapes no longer agree."""
    root = copy("losses")
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps({**manifest, "gamma": 2.0}))
    code, said, got = run(root)
    failed = {line.split()[1] for line in said.splitlines() if "FAILS" in line}
    assert code == 1 and {"decay.dflash", "decay.dflash_from_anchor"} <= failed
    assert not {"decay.exp", "kl_div.value", "decay.dpace"} & failed
    slot = load_file(root / "expected.safetensors")["pos_idx"]
    np.testing.assert_allclose(got["decay.dflash_from_anchor"], np.exp(-slot / 2.0), rtol=1e-6)


def bad_directories(root):
    """Break a target fixture in one way after another."""
    yield root / "nowhere", "no fixture directory"
    weights, stored = root / "model.safetensors", root / "expected.safetensors"
    whole, expected = weights.read_bytes(), stored.read_bytes()
    weights.write_bytes(whole[:500])
    yield root, "truncated or corrupt"
    weights.unlink()
    yield root, "has neither model.safetensors nor"
    weights.write_bytes(whole)
    stored.write_bytes(expected[:-10])
    yield root, "truncated or corrupt"
    stored.unlink()
    yield root, "has no expected.safetensors"
    save_file({"input_ids": np.full((1, 4), 10**6)}, stored)
    yield root, "token ids of shape (1, 4) are not"
    stored.write_bytes(expected)
    (root / "config.json").write_text("{")
    yield root, "is not valid JSON"


def test_a_bad_directory_is_one_line_and_exit_code_2(run, copy):
    for directory, reason in bad_directories(copy("llama")):
        code, said, written = run(directory)
        assert code == 2 and reason in said and written is None
        assert said.startswith("error: ") and said.count("\n") == 1


def test_inputs_that_are_missing_or_contradict_each_other(run, copy):
    def lacking(tensors):
        del tensors["pos_idx"]
        return tensors

    code, said, _ = run(copy("losses", lacking))
    assert code == 2 and said.strip().endswith("lacks the input pos_idx")

    def crooked(tensors):
        return {**tensors, "loss_mask": tensors["loss_mask"][:, :7]}

    code, said, _ = run(copy("losses", crooked))
    assert code == 2 and "do not fit together" in said and said.count("\n") == 1


def test_the_output_place_must_be_writable(run, tmp_path):
    (tmp_path / "out.safetensors").mkdir()
    code = check_fixture.main(
        [str(FIXTURES / "verification"), "--output", str(tmp_path / "out.safetensors")]
    )
    assert code == 2


CALLERS = {
    verification: {
        "processed_probs": rejection,
        "accept_probability": rejection,
        "accept_mask": rejection,
        "prefix_length": rejection,
        "next_distribution": rejection,
        "cut_at_stop": engine_round.commit,
        "contains_stop": engine_round.commit,
        "tally": engine_round.commit,
    },
    eagle3: {
        "rows_of": eagle3_loss.training_loss,
        "unroll": eagle3_loss.training_loss,
        "compare": eagle3_loss.training_loss,
        "weigh": eagle3_loss.training_loss,
        "chains": eagle3_loss.training_loss,
        "teach": eagle3_loss.compare,
        "kept_ids": eagle3_loss.compare,
        "draft_logits": eagle3_loss.compare,
        "fuse": eagle3_loss.unroll,
    },
    losses: {"losses": objective.compare},
}


def names_in(code):
    """Names that a function's code uses, those of functions inside it too."""
    inner = [const for const in code.co_consts if inspect.iscode(const)]
    return set(code.co_names).union(*map(names_in, inner))


def test_the_functions_are_those_that_engine_and_trainer_call():
    for module, names in CALLERS.items():
        for name, caller in names.items():
            assert name in names_in(caller.__code__), name
            assert getattr(module, name) is caller.__globals__[name], name
    assert "overlap" in losses.losses.shared.__code__.co_names
    assert verification.overlap is losses.losses.sampling.overlap
    assert targets.engine_round is engine_round is engine.rounds_module
    assert targets.Engine is engine.Engine


MOVES_DATA = {
    "argsort", "arange", "asarray", "broadcast_to", "concatenate", "full", "moveaxis", "ones",
    "pad", "stack", "take_along_axis", "zeros", "all", "max", "sum", "array_equal", "issubdtype",
    "floating", "float32", "int32", "ndarray", "argmax", "where",
}  # fmt: skip
"""What scripts may call of jax.numpy and numpy: no products, exponentials, softmaxes."""


@pytest.mark.parametrize("module", [targets, verification, losses, eagle3])
def test_the_scripts_hold_no_second_implementation(module):
    tree = ast.parse(inspect.getsource(module))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("jnp", "np")
    }
    assert called <= MOVES_DATA
    assert not any(isinstance(node, ast.MatMult) for node in ast.walk(tree))


def test_judge():
    want = np.asarray([0.0, 20.0], np.float32)
    assert not judge("x", want + 1.9e-3, want).failed  # 1e-4 of the largest
    assert judge("x", want + 2.1e-3, want).failed
    small = want / 1e6
    assert not judge("x", small + 9e-5, small).failed  # never tighter than 1e-4
    assert judge("a.grad.w", small + 9e-5, small).failed  # but gradients are relative
    assert not judge("a.grad", small + 3e-8, small).failed
    assert judge("x", np.full(2, np.nan), want).failed
    assert "shape (1,) for (2,)" in judge("x", want[:1], want).verdict
    ids = np.asarray([1, 2])
    assert judge("x", ids + 1, ids).failed and not judge("x", ids.astype(np.int32), ids).failed
