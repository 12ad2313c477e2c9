"""Train the demonstration target and its heads, and put them into specjax/demo/.

    python scripts/train_demo.py --prompts train_gsm8k.jsonl --answers answers.jsonl --out runs/demo

The answers are those of `scripts/regenerate.py --suffix gsm8k` on a larger model to the prompts.
Stages: tokenizer, target, answers (the target's own), heads, assemble. Each is skipped when done,
and goes on where it stands: the same command resumes after any interruption. `--until STAGE` stops
behind one.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the stages are a package beside this script

from specjax.cli import guarded  # noqa: E402

STAGES = ("tokenizer", "target", "answers", "heads", "assemble")


def tokenizer(args: argparse.Namespace) -> None:
    """Choose and reshape the answers, learn the tokenizer, write the target's configuration."""
    from scripts.demo import target, texts
    from scripts.demo import tokenizer as bpe

    prompts = texts.read_rows(args.prompts)
    chats = list(texts.trained_chats(texts.read_rows(args.answers), len(prompts)))
    count = texts.write_rows(chats, args.out / "chats.jsonl")
    said = (message["content"] for chat in chats for message in chat["messages"])
    bpe.train(said, args.out / "base")
    target.write_config(args.out / "base")
    print(f"{count} answers in the trained form")


def target(args: argparse.Namespace) -> None:
    """Train the target."""
    from scripts.demo import target as model

    out = args.out
    model.train(out / "base", out / "chats.jsonl", out / "target_run", args.epochs, out / "target")


def answers(args: argparse.Namespace) -> None:
    """Let the target answer the prompts, those held out as well."""
    from scripts.demo import heads as drafting

    share = drafting.answers(args.out / "target", args.prompts, args.out, args.count)
    print(f"{share:.1%} of the held-out answers are in the trained form")


def heads(args: argparse.Namespace) -> None:
    """Train the five heads."""
    from scripts.demo import heads as drafting

    drafting.train(args.out / "target", args.out / "heads")


def assemble(args: argparse.Namespace) -> None:
    """Put everything into the package, evaluate it there, and write the model card."""
    from scripts.demo import assemble as package
    from scripts.demo import texts
    from scripts.demo.heads import run as script

    package.files(args.out, args.prompts, args.demo)
    found = args.out / "evaluation"
    shutil.rmtree(found, ignore_errors=True)
    script(["-m", "specjax.eval", "--out", found, f"Eval.num_prompts={texts.SHIPPED}"])
    package.card(args.out, args.prompts, args.demo, found / "results.jsonl")


def _path(text: str) -> Path:
    return Path(text).expanduser().resolve()


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--prompts", required=True, type=_path, help="prompt file, JSON lines")
    parser.add_argument("--answers", required=True, type=_path, help="a larger model's answers")
    parser.add_argument("--out", required=True, type=_path, help="folder of all runs")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage")
    parser.add_argument("--epochs", type=int, default=5, help="of the target (default 5)")
    parser.add_argument("--count", type=int, default=1600, help="answers for the heads")
    parser.add_argument("--demo", type=_path, default=ROOT / "specjax" / "demo", help="the package")
    args = parser.parse_args(argv)

    def run() -> int:
        stages: dict[str, Callable[[argparse.Namespace], None]] = {
            "tokenizer": tokenizer,
            "target": target,
            "answers": answers,
            "heads": heads,
            "assemble": assemble,
        }
        for name in STAGES[: STAGES.index(args.until) + 1]:
            done = args.out / f"{name}.done"
            if done.exists():
                continue
            print(f"stage {name}", flush=True)
            stages[name](args)
            done.touch()
        return 0

    return guarded(run)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
