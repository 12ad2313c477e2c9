"""Model cards of exported heads: what one is, how it is used, what was measured, its training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.core.errors import DataError
from specjax.core.params import count
from specjax.evaluation.report import number
from specjax.heads.export import Exported, Verifier

Record = dict[str, Any]

_PATH = re.compile(r"(?<![\w.:/~-])(?:~|\.{1,2})?/(?:[^\s/`'\",]+/)*([^\s/`'\",]+)")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HEADER = ["prompts", "number", "T", "batch", "dtype", "drafts", "acceptance length"]
_HEADER += ["by position", "speedup", "identical texts", "machine"]

_TEMPLATE = """\
---
library_name: specjax
{% if hub_id %}
base_model: {{ hub_id }}
{% endif %}
tags: [speculative-decoding, {{ head.name }}]
---

# {{ head.name }} draft head for {{ target }}

A draft head for lossless speculative decoding of {{ target }}, trained by SpecJAX.

| | |
|---|---|
{% for name, value in facts %}
| {{ name }} | {{ value }} |
{% endfor %}

{% if rows %}
The file holds no {{ rows | join(" and no ") }} rows: a reader takes them from the target. SpecJAX
checks by a digest that it is the right one, and refuses another.

{% endif %}
    python -m specjax.eval --target TARGET --head THIS_FOLDER --prompts PROMPTS.jsonl

{% if layout == "speculators" %}
`config.json` is in the format of `speculators`, which vLLM reads; there the drafts per round are
those of `speculators_config`.

{% endif %}
## Measured

{% if lines %}
| {{ header | join(" | ") }} |
|{% for _ in header %}---|{% endfor %}

{% for line in lines %}
| {{ line | join(" | ") }} |
{% endfor %}

Speedups are over the same engine without a head, in its faster dtype. "Identical" counts the texts
that equal that engine's in the same dtype; of the others, {{ near_ties }} of {{ differing }} part
at two tokens so close that rounding decides.
{% else %}
Nothing was measured for this card.
{% endif %}

## Training

{{ training }}
"""


def runs_of(records: Iterable[Record], name: str) -> list[Record]:
    """Return the records of runs with a head of this algorithm.

    Raises:
        DataError: there is no such run.
    """
    runs = [row for row in records if row["head"] == name and not row.get("error")]
    if not runs:
        raise DataError(f"the results hold no run of a head of kind {name!r}")
    return runs


def _line(row: Record) -> list[str]:
    settings = row["configuration"]
    positions = " ".join(number(x)[1:] for x in row["acceptance_rate_per_position"])
    same = "n/a" if row["identical"] is None else f"{row['identical']} of {row['prompts']}"
    machine = row["machine"]
    cores = f", {machine['cores']} cores" if machine.get("platform") == "cpu" else ""
    return [
        Path(settings["prompts"]).name or "generated",
        str(row["prompts"]),
        format(row["temperature"], "g"),
        str(row["concurrency"]),
        row["dtype"],
        str(row["num_speculative_tokens"]),
        number(row["mean_acceptance_length"]),
        positions,
        number(row["speedup"]),
        same,
        f"{machine.get('device_kind', 'n/a')}{cores}",
    ]


def training_part(card: str) -> str:
    """Return what a head's own card says of its training, without title and folders' paths.

    Args:
        card: as training wrote it, or one of `model_card`'s.
    """
    body = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    body = body.rpartition("\n## Training\n")[2].strip()
    lines = [line for line in body.splitlines() if not line.startswith("# ")]
    return _PATH.sub(r"\1", "\n".join(lines)).strip()


def model_card(
    exported: Exported,
    verifier: Verifier,
    dtype: str,
    runs: Sequence[Record] = (),
    training: str = "",
) -> str:
    """Return the text of a card.

    Args:
        exported: what was written.
        verifier: the target.
        dtype: dtype on disk.
        runs: records of an evaluation, see `runs_of`.
        training: Markdown on how it was trained.
    """
    import jinja2

    head = exported.head
    template = jinja2.Environment(
        autoescape=False, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True
    )
    return template.from_string(_TEMPLATE).render(
        head=head,
        verifier=verifier,
        hub_id=verifier.name if _HUB_ID.fullmatch(verifier.name) else "",
        target=Path(verifier.name).name,
        layout=exported.layout,
        rows=exported.from_target,
        facts=list(_facts(exported, dtype).items()),
        header=_HEADER,
        lines=[_line(row) for row in runs],
        near_ties=sum(row["near_ties"] or 0 for row in runs),
        differing=sum(row["differing"] or 0 for row in runs),
        training=training or "Nothing is known of it here.",
    )


def _facts(exported: Exported, dtype: str) -> Mapping[str, Any]:
    head = exported.head
    facts: dict[str, Any] = {
        "layout": exported.layout,
        "weights on disk" if exported.left_out else "weights": f"{_stored(exported):,} in {dtype}",
    }
    if head.max_tokens is not None:
        facts["most drafts per round"] = head.max_tokens
    if head.taps:
        facts["residual streams read"] = ", ".join(map(str, head.taps)) + " (0 is the embedding)"
    if head.reads:
        facts["layers whose keys it reads"] = ", ".join(map(str, head.reads))
    if getattr(head, "mapped", False):
        facts["draft vocabulary"] = f"{head.draft_vocab:,} of {head.vocab:,} tokens"
    if temperatures := getattr(head, "temperatures", ()):
        facts["confidence temperatures"] = ", ".join(format(t, ".2f") for t in temperatures)
    return facts


def _stored(exported: Exported) -> int:
    specs = exported.head.specs()
    left_out = {name: getattr(specs, name) for name in exported.left_out}
    return count(specs) - sum(count(spec) for spec in left_out.values())
