"""What another package makes of an exported head. Run by check_export.py, without SpecJAX.

    python scripts/export_reader.py EXPORT TARGET GIVEN.safetensors MADE.safetensors

It needs torch, safetensors, and speculators 0.9 or, for Gemma 4 assistants, transformers. The
packages' own forward passes run, in float32; where one draws something at random (the anchors of a
block head) it is given instead. GIVEN holds a text of P tokens, an anchor and drafts; MADE gets
the logits that the drafts are picked from.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def eagle3(model: Any, given: Tensors) -> Tensors:
    """Run the training-time test; its row P - 1 sees what drafting sees."""
    taps, tokens, drafts = given["taps"], given["tokens"], given["drafts"]
    prefix, count = taps.shape[1], len(drafts)
    padding = taps[:, -1:].expand(-1, count, -1)  # behind the row that counts
    states = torch.cat([taps, padding], 1)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *call: seen.append(call[2][0, prefix - 1]))
    model(
        hidden_states=_joined(states),
        input_ids=torch.cat([tokens[1:], drafts])[None],
        document_ids=torch.zeros(1, prefix + count, dtype=torch.long),
        ttt_steps=count,
    )
    return {"logits": torch.stack(seen)}


def blocks(model: Any, given: Tensors) -> Tensors:
    """Run DFlash's or DSpark's pass over one block, whose tokens are anchor and drafts."""
    taps, tokens, drafts = given["taps"], given["tokens"], given["drafts"]
    prefix, size = taps.shape[1], model.block_size
    block = torch.cat([tokens[-1:], drafts])[:size]
    filler = torch.zeros(2 * size, dtype=torch.long)
    text = torch.cat([tokens[:-1], block, filler])[: prefix + 2 * size]
    states = torch.cat([taps, taps[:, -1:].expand(-1, len(text) - prefix, -1)], 1)
    made: Tensors = {}

    def compared(logits: torch.Tensor, targets: Any, third: Any, *rest: Any, **more: Any) -> Any:
        first = 0 if model.config.sample_from_anchor else 1
        made["logits"] = logits[0, first:size]
        if model.config.speculators_model_type == "dspark" and third is not None:
            made["confidence"] = third[0, first:size]
        return torch.zeros(()), {}

    dflash = importlib.import_module("speculators.models.dflash.core")
    own = importlib.import_module(type(model).__module__)
    dflash.select_anchors = lambda *_: (torch.tensor([prefix]), torch.tensor([True]))
    own.compute_metrics = compared
    model(
        hidden_states=_joined(states),
        input_ids=text[None],
        loss_mask=torch.ones(1, len(text)),
        verifier_last_hidden_states=states[:1],
        document_ids=torch.zeros(1, len(text), dtype=torch.long),
        max_anchors=1,
    )
    return made


def mtp(model: Any, given: Tensors) -> Tensors:
    """Run all steps over the text; each is a pass of its own, as in training."""
    hidden, tokens, drafts = given["hidden"], given["tokens"], given["drafts"]
    steps = model.config.num_speculative_steps
    rest = torch.zeros(steps + 1, dtype=torch.long)
    text = torch.cat([tokens, drafts, rest])[: len(hidden) + steps + 1]
    states = torch.cat([hidden, hidden[-1:].expand(steps + 1, -1)])
    logits, _, _ = model(input_ids=text[None], hidden_states=states[None])
    return {"logits": torch.stack([x[0, -1] for x in logits[: len(drafts)]])}


def assistant(model: Any, given: Tensors) -> Tensors:
    """Draft as transformers' generation does: one query, the target's keys, states handed on."""
    position = torch.tensor([[given["hidden"].shape[0]]])
    kinds = ("full_attention", "sliding_attention")
    full = tuple(given[f"{part}.full_attention"] for part in ("key", "value"))
    keys = {
        kind: tuple(given.get(f"{part}.{kind}", full[i]) for i, part in enumerate(("key", "value")))
        for kind in kinds
    }
    state, logits = given["hidden"][-1:], []
    for row in given["embedded"]:
        inputs = torch.cat([row[None], state], -1)[None]
        out = model(inputs_embeds=inputs, position_ids=position, shared_kv_states=keys)
        state = out.last_hidden_state[0]
        logits.append(out.logits[0, 0])
    return {"logits": torch.stack(logits)}


READERS = {"eagle3": eagle3, "dflash": blocks, "dspark": blocks, "mtp": mtp}


def _joined(states: torch.Tensor) -> torch.Tensor:
    """Turn `[n, S, H]` into `[1, S, n * H]`."""
    return torch.cat(list(states), -1)[None]


def load(folder: str, target: str) -> tuple[Any, Any]:
    """Return (the package's model, the function that runs it)."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    kind = config.get("speculators_model_type")
    if kind is None:
        from transformers import Gemma4AssistantForCausalLM

        model = Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.eval(), assistant
    from speculators import SpeculatorModel, SpeculatorModelConfig

    read = SpeculatorModelConfig.from_pretrained(folder)
    read.speculators_config.verifier.name_or_path = target
    # The packages' default needs a compiler, or a GPU, or both.
    read.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=read, dtype=torch.float32)
    # The package may have taken the target's tables: in the export's dtype, as both are served.
    stored = load_file(str(Path(folder) / "model.safetensors"))
    dtype = next(x.dtype for name, x in stored.items() if name.endswith("norm.weight"))
    for table in (model.embed_tokens.weight, model.lm_head.weight):
        table.data = table.data.to(dtype).float()
    return model.eval(), READERS[kind]


def main(words: list[str]) -> int:
    """Load, run, write."""
    folder, target, given, made = words
    model, run = load(folder, target)
    with torch.no_grad():
        found = run(model, load_file(given))
    save_file({name: x.float().contiguous() for name, x in found.items()}, made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
