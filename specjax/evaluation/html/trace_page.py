"""trace.html: texts coloured by how each token came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specjax.evaluation import report
from specjax.evaluation.html import palette
from specjax.evaluation.html.render import render as fill
from specjax.evaluation.records import Record

PAGE = "trace.html"


def pages(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Return what the page shows of each record that was traced."""
    drafting = [row for row in rows if not row["error"] and row["head"] != "none"]
    found = []
    for row in drafting:
        told = [f"{k} {v}" for k, v in report.apart(row, drafting).items() if v]
        drafts = row["num_speculative_tokens"]
        name = ", ".join([palette.title(row["head"]), f"{drafts} drafts per round", *told])
        if texts := row.get("trace"):
            shown = [_text(text) for text in texts]
            found.append(
                {"name": name, "head": row["head"], "target": row["target"], "texts": shown}
            )
    return found


def render(traced: Sequence[Mapping[str, Any]]) -> str:
    """Return the page; `traced` is what `pages` found."""
    return fill("trace.html.j2", title="A look inside the texts", runs=traced)


def _text(text: Mapping[str, Any]) -> dict[str, Any]:
    rounds = [_round(each) for each in text["rounds"]]
    judged = [each for each in text["rounds"] if each["verified"]]
    accepted = sum(each["accepted"] for each in judged)
    verified = sum(each["verified"] for each in judged)
    most = max((each["verified"] for each in judged), default=0)
    counts = [sum(each["accepted"] == n for each in judged) for n in range(most + 1)]
    return {
        **text,
        "rounds": rounds,
        "tokens": sum(len(each["tokens"]) for each in rounds),
        "decode_rounds": len(rounds) - 1,
        "accepted": accepted,
        "verified": verified,
        "length": f"{1 + accepted / len(judged):.2f}" if judged else "n/a",
        "rate": f"{100 * accepted / verified:.0f} %" if verified else "n/a",
        "counts": [(n, count, count / max(1, *counts)) for n, count in enumerate(counts)],
    }


def _round(each: Mapping[str, Any]) -> dict[str, Any]:
    accepted, verified = each["accepted"], each["verified"]
    sure = each["confidence"] or [None] * len(each["drafts"])
    own = "target" if not verified else "bonus" if accepted == verified else "correction"
    tokens = [
        {
            "text": text,
            "kind": "draft" if i < accepted else own,
            "position": i + 1,
            "shade": min(i, 7),
            "confidence": sure[i] if i < accepted else None,
        }
        for i, text in enumerate(each["emitted"])
    ]
    drafts = [
        {
            "text": text,
            "position": i + 1,
            "confidence": sure[i],
            "fate": _fate(i, accepted, verified),
        }
        for i, text in enumerate(each["drafts"])
    ]
    written = each["emitted"][accepted] if accepted < len(each["emitted"]) else None
    return {
        "tokens": tokens,
        "drafts": drafts,
        "accepted": accepted,
        "verified": verified,
        "own": own,
        "written": written,
    }


def _fate(position: int, accepted: int, verified: int) -> str:
    if position < accepted:
        return "accepted"
    if position >= verified:
        return "not verified"
    return "rejected" if position == accepted else "behind a rejected one"
