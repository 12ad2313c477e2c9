"""Answer a prompt file with the target itself, for a head to be trained on.

    python scripts/regenerate.py --target TARGET_DIR --prompts prompts.jsonl \
        --output answers.jsonl --limit 2000 --suffix gsm8k

Each line of the output is one conversation: {"messages": [...], "prompt_index", "finish_reason",
"num_tokens", "exact"}, in the order in which they end. Killed at any moment, the same command
goes on: no prompt is lost and none is answered twice. A larger --limit adds to what is there.
"""

import argparse
import dataclasses
import fcntl
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specjax.cli import guarded
from specjax.core.errors import DataError
from specjax.training import rendering

# What the prompts of an evaluation file end with, where its training prompts do not.
SUFFIXES = {
    "gsm8k": "\nPlease reason step by step, and put your final answer within \\boxed{}.",
}


class AnswerFile:
    """The output: whole lines only, one per answered prompt, by one process at a time."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or make the file; a line torn by a kill is cut off.

        Args:
            path: of the JSON lines.
            settings: what the answers depend on; kept beside them.

        Raises:
            DataError: another process writes it, it was made with other settings, or a line
                before the last is not ours.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: IO[bytes] = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process is writing {path}") from None
        self._check_settings(settings)
        self.rows = self._read()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        beside = self.path.with_suffix(".settings.json")
        if beside.exists() and os.fstat(self._file.fileno()).st_size:
            saved = json.loads(beside.read_text(encoding="utf-8"))
            changed = [
                f"{name} was {saved.get(name)!r}, is now {settings.get(name)!r}"
                for name in (*settings, *(saved.keys() - settings.keys()))
                if saved.get(name) != settings.get(name)
            ]
            if changed:
                raise DataError(f"{self.path} was made otherwise: {'; '.join(changed)}")
        partial = beside.with_name(f".{beside.name}.partial")
        partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, beside)

    def _read(self) -> dict[int, dict[str, Any]]:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        self._file.truncate(whole)
        rows: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                rows[row["prompt_index"]] = row
            except (ValueError, TypeError, KeyError):
                raise DataError(f"{self.path}:{number} is not an answer of this script") from None
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Write one answer; it is on the disk when this returns."""
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows[row["prompt_index"]] = row

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


@dataclasses.dataclass
class Chat:
    """A conversation under way: the user's turns still to come, and what was said so far."""

    index: int
    waiting: list[str]
    messages: list[dict[str, str]]
    reasons: list[str] = dataclasses.field(default_factory=list)
    tokens: int = 0
    exact: bool = True


def regenerate(args: argparse.Namespace) -> str:
    """Answer what is not answered yet and return the closing line.

    Raises:
        SpecJaxError: anything wrong with the target, the prompts or the output file.
    """
    import jax  # noqa: F401  (after --help)
    from transformers import AutoTokenizer

    from specjax import targets
    from specjax.data.prompts import load_prompts
    from specjax.io.hf import resolve
    from specjax.training.fingerprint import of_files, of_target
    from specjax.training.fingerprint import rendering as of_rendering

    suffix = SUFFIXES.get(args.suffix, args.suffix)
    prompts = load_prompts(args.prompts, suffix, args.limit)
    settings = {
        "target": of_target(args.target),
        "prompts": of_files([args.prompts]),
        "suffix": suffix,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": args.seed,
        "dtype": args.dtype,
    }
    if (rendered := of_rendering(rendering.options(args))) is not None:
        settings["rendering"] = rendered
    file = AnswerFile(args.output, settings)
    console = Console(stderr=True)
    try:
        left = [index for index in range(len(prompts)) if index not in file.rows]
        if file.rows:
            console.print(f"{len(prompts) - len(left)} of {len(prompts)} answered before")
        if left:
            target, params = targets.load(args.target, args.dtype)
            tokenizer = AutoTokenizer.from_pretrained(resolve(args.target))
            encoder = rendering.encoder_of(args, tokenizer, tuple(target.info.stop_ids))
            chats = [
                Chat(index, list(prompts[index].turns[1:]), prompts[index].opening())
                for index in left
            ]
            _answer(args, target, params, encoder, chats, file, console)
    finally:
        file.close()
    return _closing(args.output, file, len(prompts))


def _answer(
    args: argparse.Namespace,
    target: Any,
    params: Any,
    encoder: Any,
    chats: Sequence[Chat],
    file: AnswerFile,
    console: Console,
) -> None:
    """Answer turn after turn; a conversation is written when its last turn is answered."""
    from specjax.decode.config import EngineConfig
    from specjax.decode.engine import Engine
    from specjax.decode.requests import Request, Result

    engine = Engine(target, params, config=EngineConfig(concurrency=args.concurrency))
    longest = target.info.max_context - args.max_new_tokens
    with _progress(console) as bar:
        task = bar.add_task("answer", total=len(chats), shown="compiling")
        generated = 0
        while chats:
            asked: list[tuple[Chat, list[int]]] = []
            for chat in chats:
                ids = encoder.prompt_ids(chat.messages)
                if len(ids) > longest:
                    raise DataError(
                        f"prompt {chat.index} of {args.prompts} has {len(ids)} tokens; with "
                        f"--max-new-tokens {args.max_new_tokens} the target takes {longest}"
                    )
                asked.append((chat, ids))
            requests = [
                Request(
                    prompt_ids=tuple(ids),
                    max_new_tokens=args.max_new_tokens,
                    temperature=args.temperature,
                    top_k=args.top_k,
                    top_p=args.top_p,
                    min_p=args.min_p,
                    # Of the prompt and turn alone, so that a resumed run draws the same.
                    seed=(args.seed * 1_000_003 + chat.index * 101 + len(chat.reasons)) % 2**32,
                )
                for chat, ids in asked
            ]

            def take(result: Result, asked: list[tuple[Chat, list[int]]] = asked) -> None:
                nonlocal generated
                chat, prompt_ids = asked[result.index]
                _add_answer(chat, encoder, prompt_ids, result)
                generated += len(result.token_ids)
                seconds = bar.tasks[0].elapsed or 1e-9
                shown = f"{generated / seconds:,.0f} tokens/s"
                if chat.waiting:
                    chat.messages.append({"role": "user", "content": chat.waiting.pop(0)})
                    bar.update(task, shown=shown)
                    return
                file.append(_row(chat))
                bar.update(task, advance=1, shown=shown)
                if not console.is_terminal and len(file.rows) % 50 == 0:
                    console.print(f"{len(file.rows)} answered, {shown}", highlight=False)

            engine.generate(requests, take)
            chats = [chat for chat in chats if chat.messages[-1]["role"] == "user"]


def _add_answer(chat: Chat, encoder: Any, prompt_ids: list[int], result: Any) -> None:
    """Add the answer's text, and see whether training would read back the generated ids."""
    ids = list(result.token_ids)
    said = ids[:-1] if result.finish_reason == "stop" else ids
    text = encoder.tokenizer.decode(said, clean_up_tokenization_spaces=False)
    message = {"role": "assistant", "content": text}
    if result.finish_reason == "length":
        message["finish_reason"] = "length"  # its end is not the model's doing: not supervised
    chat.messages.append(message)
    chat.reasons.append(result.finish_reason)
    chat.tokens += len(ids)
    whole = [*prompt_ids, *ids]
    chat.exact &= encoder.encode(chat.messages).ids[: len(whole)].tolist() == whole


def _row(chat: Chat) -> dict[str, Any]:
    return {
        "messages": chat.messages,
        "prompt_index": chat.index,
        "finish_reason": chat.reasons[-1],
        "num_tokens": chat.tokens,
        "exact": chat.exact,
    }


def _closing(path: Path, file: AnswerFile, asked: int) -> str:
    rows = file.rows.values()
    cut = sum(row["finish_reason"] == "length" for row in rows)
    other = sum(not row["exact"] for row in rows)
    tokens = sum(row["num_tokens"] for row in rows)
    return (
        f"{path}: {len(file.rows)} answers to {asked} prompts, {tokens:,} tokens; {cut} cut at "
        f"the limit; {other} whose text is tokenised otherwise than it was generated"
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("answers"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", required=True, help="Hugging Face directory or hub id")
    parser.add_argument("--prompts", required=True, help="JSON lines or another source")
    parser.add_argument("--output", required=True, type=Path, help="JSON lines to write or go on")
    parser.add_argument("--limit", type=int, help="answer the first prompts only")
    parser.add_argument(
        "--suffix",
        default="",
        help=f"text appended to every user message, or the name of one: {', '.join(SUFFIXES)}",
    )
    parser.add_argument("--max-new-tokens", type=int, default=384, help="default 384")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0, greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 is off")
    parser.add_argument("--min-p", type=float, default=0.0, help="0 is off")
    parser.add_argument("--seed", type=int, default=0, help="of sampled answers")
    parser.add_argument("--concurrency", type=int, default=16, help="prompts decoded together")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the target"
    )
    rendering.add_arguments(parser, supervised=False)
    args = parser.parse_args(argv)

    def run() -> int:
        Console().print(regenerate(args), markup=False, highlight=False, soft_wrap=True)
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
