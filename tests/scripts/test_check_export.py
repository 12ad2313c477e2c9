"""Exports against the packages that users load them with."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from scripts import check_export
from specjax import heads, targets
from specjax.core.errors import PairingError, SpecJaxError
from specjax.core.params import init_params, map_specs
from specjax.heads.base import Borrowed, borrow
from specjax.heads.dflash.config import DFlashConfig
from specjax.heads.dflash.head import DFlashHead
from specjax.heads.eagle3.config import Eagle3Config
from specjax.heads.eagle3.head import Eagle3Head
from specjax.heads.export import Verifier, export
from specjax.heads.gemma4_mtp.config import Gemma4MtpConfig
from specjax.heads.gemma4_mtp.head import Gemma4MtpHead
from specjax.heads.mtp.config import MtpConfig
from specjax.heads.mtp.head import MtpHead
from specjax.io.hf import read_config, save_checkpoint, write_json
from specjax.targets.base import TargetInfo

FIXTURES = Path(__file__).parents[1] / "fixtures"
VOCAB, MASK = 80, 79
KEPT = np.arange(3, 70, 2)
BLOCK: dict[str, Any] = {"block_size": 5, "layers": 2, "mask_token_id": MASK, "taps": (1, 3, 5)}
SPARK: dict[str, Any] = {
    **BLOCK,
    "layout": "speculators",
    "sample_from_anchor": True,
    "markov_rank": 6,
    "confidence": True,
    "confidence_with_markov": True,
}
WINDOW: dict[str, Any] = {"layer_types": ("sliding", "full"), "sliding_window": 6}
Make = Callable[[TargetInfo], Any]


def eagle3(**settings: Any) -> Make:
    def make(info: TargetInfo) -> Any:
        config = Eagle3Config(taps=(1, 3, 5), **settings)
        return Eagle3Head.for_target(info, info.draft_block, config, len(KEPT))

    return make


def block(kept: bool = True, **settings: Any) -> Make:
    given = DFlashConfig(**{**BLOCK, **settings})
    return lambda info: DFlashHead.for_target(info, given, len(KEPT) if kept else None)


# (the target's family, how the head is made, the layout it is written in)
CASES: dict[str, tuple[str, Make, str]] = {
    "eagle3": ("llama", eagle3(), "speculators"),
    "eagle3-norms": (
        "llama",
        eagle3(norm_before_fc=True, norm_output=True, norm_before_residual=True),
        "speculators",
    ),
    "eagle3-fc_norm": ("qwen3", eagle3(fc_norm=True), "speculators"),
    "dflash": ("llama", block(), "speculators"),
    "dflash-whole": ("llama", block(kept=False), "speculators"),
    "dflash-from-anchor": ("qwen3", block(sample_from_anchor=True), "speculators"),
    "dflash-sliding": ("llama", block(layout="speculators", **WINDOW), "speculators"),
    "dflash-sliding-open": (
        "llama",
        block(layout="speculators", causal="none", **WINDOW),
        "speculators",
    ),
    "dspark": ("llama", block(**SPARK), "speculators"),
    "dspark-gated": ("llama", block(**SPARK, markov_head="gated"), "speculators"),
    "dspark-rnn": ("llama", block(**SPARK, markov_head="rnn", **WINDOW), "speculators"),
    "dspark-own-slot": (
        "llama",
        block(**{**SPARK, "sample_from_anchor": False, "confidence_with_markov": False}),
        "speculators",
    ),
    "mtp": ("qwen3", lambda info: MtpHead.for_target(info, MtpConfig(modules=1)), "speculators"),
    "gemma4_mtp": (
        "llama",
        lambda info: Gemma4MtpHead.for_target(
            info, Gemma4MtpConfig(layers=2, hidden=16, mlp=24, centroids=8, centroid_top_k=3)
        ),
        "original",
    ),
}


def write_target(folder: Path, family: str) -> tuple[Any, Any]:
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    target = targets.from_config(config)
    params = init_params(target.specs(), jax.random.key(1), scale=0.3)
    save_checkpoint(target.specs(), params, config, folder)
    return target, params


def louder(head: Any, lent: Borrowed) -> Any:
    """Return weights that all do something, with the target's rows where the head has them."""
    mapped = {"kept": KEPT} if getattr(head, "mapped", False) else {}
    params = head.init(jax.random.key(2), lent, **mapped)
    own = {"embedding": None, "output": None} if hasattr(params, "output") else {}
    if not own and hasattr(params, "clusters"):
        own = {"clusters": None}
    keys = iter(jax.random.split(jax.random.key(3), 200))

    def noisy(spec: Any, value: jax.Array) -> jax.Array:
        if spec.dtype:
            return value
        near = 1.0 if spec.init == "ones" else 0.0
        return near + 0.25 * jax.random.normal(next(keys), value.shape)

    bare = dataclasses.replace(params, **own)
    noised = map_specs(noisy, dataclasses.replace(head.specs(), **own), bare)
    return dataclasses.replace(noised, **{name: getattr(params, name) for name in own})


def written(folder: Path, name: str) -> list[str]:
    """Write a target and an export for it; return the command's words."""
    family, make, layout = CASES[name]
    target, weights = write_target(folder / "target", family)
    lent = borrow(target, weights)
    head = make(target.info)
    verifier = Verifier(str(folder / "target"), ("LlamaForCausalLM",))
    export(head, louder(head, lent), lent, folder / "head", layout=layout, verifier=verifier)
    return [str(folder / "head")]


@pytest.fixture(scope="module")
def python() -> Path:
    """The other packages' interpreter."""
    try:
        return check_export.environment(check_export.cache_folder())
    except SpecJaxError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_other_packages_read_it_as_we_do(
    name: str, python: Path, tmp_path: Path, capsys: Any
) -> None:
    words = [*written(tmp_path, name), f"--python={python}"]
    assert check_export.main(words) == 0, capsys.readouterr().out
    assert "reads it as we do" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.torch
def test_modules_of_a_target_leave_it(python: Path, tmp_path: Path, capsys: Any) -> None:
    root = FIXTURES / "qwen3_5_vl_mtp"
    target, weights = targets.load(root)
    lent = borrow(target, weights)
    head, params = heads.find("mtp", root, target.info)
    export(head, params, lent, tmp_path, layout="speculators", verifier=Verifier(str(root)))
    words = [str(tmp_path), f"--target={root}", f"--python={python}"]
    assert check_export.main(words) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.torch
def test_an_assistant_of_a_gemma_target(python: Path, tmp_path: Path, capsys: Any) -> None:
    root = FIXTURES / "gemma4_moe"
    target, weights = targets.load(root)
    lent = borrow(target, weights)
    config = Gemma4MtpConfig(layers=2, hidden=16, heads=4, mlp=24)
    head = Gemma4MtpHead.for_target(target.info, config)
    assert [layer.label for layer in head.layers] == ["sliding", "full"]
    params = louder(head, lent)
    export(head, params, lent, tmp_path, layout="original", verifier=Verifier(str(root)))
    assert check_export.main([str(tmp_path), f"--python={python}"]) == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.torch
def test_a_package_that_refuses_is_quoted(python: Path, tmp_path: Path, capsys: Any) -> None:
    written(tmp_path, "eagle3")
    config = read_config(tmp_path / "head")
    config["norm_before_fc"] = config["fc_norm"] = True  # the package's own check
    write_json(config, tmp_path / "head" / "config.json")
    with pytest.raises(PairingError, match=r"refused: .*mutually exclusive"):
        check_export.theirs(python, tmp_path / "head", str(tmp_path / "target"), {})


def same_as_ours(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the other side make what ours does, but for `changes`."""
    ours = check_export.ours
    made: dict[str, Any] = {}

    def kept(*given: Any) -> Any:
        kind, text, found = ours(*given)
        made.update(found)
        return kind, text, found

    monkeypatch.setattr(check_export, "ours", kept)
    monkeypatch.setattr(
        check_export,
        "theirs",
        lambda *_: {k: changes.get(k, lambda x: x)(v) for k, v in made.items()},
    )


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({}, 0, "reads it as we do"),
        ({"logits": lambda x: x * 1.001}, 1, "OTHERWISE"),
        ({"confidence": lambda x: x + np.nan}, 1, "OTHERWISE"),
    ],
    ids=["same", "other-logits", "nan"],
)
def test_the_verdict(
    change: Any, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    same_as_ours(monkeypatch, **change)
    assert check_export.main([*written(tmp_path, "dspark"), "--python=unused"]) == code
    out = capsys.readouterr().out
    assert said in out and "confidence 3" in out


def test_mistakes_are_one_line(tmp_path: Path, capsys: Any) -> None:
    words = written(tmp_path, "eagle3")
    config = read_config(tmp_path / "head")
    verifier = {**config["speculators_config"], "verifier": {"name_or_path": None}}
    write_json({**config, "speculators_config": verifier}, tmp_path / "head" / "config.json")
    assert check_export.main(words) == 2
    assert "names no target: give --target" in capsys.readouterr().err
    original = {"architectures": ["LlamaForCausalLMEagle3"]}
    write_json(original, tmp_path / "head" / "config.json")
    assert check_export.main([*words, f"--target={tmp_path / 'target'}"]) == 2
    assert "--layout speculators" in capsys.readouterr().err


def test_bodies_alone_are_for_us(tmp_path: Path, capsys: Any) -> None:
    target, weights = write_target(tmp_path / "target", "llama")
    lent = borrow(target, weights)
    head = CASES["dflash"][1](target.info)
    verifier = Verifier(str(tmp_path / "target"))
    params = louder(head, lent)
    export(
        head,
        params,
        lent,
        tmp_path / "head",
        layout="speculators",
        verifier=verifier,
        bodies_only=True,
    )
    assert check_export.main([str(tmp_path / "head")]) == 2
    assert "written with --bodies-only" in capsys.readouterr().err


def test_an_environment_that_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_export.sys, "executable", "/bin/false")
    with pytest.raises(SpecJaxError, match="could not be made"):
        check_export.environment(tmp_path / "env")
