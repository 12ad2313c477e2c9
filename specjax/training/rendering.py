"""How scripts are told to render conversations: the options of `DataConfig` as words."""

from __future__ import annotations

import argparse
from typing import Any

from specjax.training.config import DataConfig


def add_arguments(parser: argparse.ArgumentParser, supervised: bool = True) -> None:
    """Add the options; `supervised`: also which part of an answer is trained on."""
    boolean = argparse.BooleanOptionalAction
    parser.add_argument(
        "--chat-template", help="in place of the tokenizer's: a file, or chatml or plain"
    )
    parser.add_argument("--enable-thinking", action=boolean, help="passed to the chat template")
    if supervised:
        parser.add_argument(
            "--supervise-thinking", action=boolean, default=True, help="train on think blocks"
        )


def options(args: argparse.Namespace) -> DataConfig:
    """Return the options as settings."""
    return DataConfig(
        chat_template=args.chat_template,
        enable_thinking=args.enable_thinking,
        supervise_thinking=getattr(args, "supervise_thinking", True),
    )


def encoder_of(args: argparse.Namespace, tokenizer: Any, stop_ids: tuple[int, ...]) -> Any:
    """Return the `ChatEncoder` that renders and masks conversations as the options say.

    Raises:
        DataError: no chat template, or one that cannot be used.
    """
    from specjax.training.rows import encoder_for  # imports jax

    return encoder_for(options(args), tokenizer, stop_ids)
