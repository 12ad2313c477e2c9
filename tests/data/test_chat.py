"""The loss mask is proved by decoding back what is supervised (F17, F25)."""

import numpy as np
import pytest

from specjax.core.errors import DataError
from specjax.data.chat import ChatEncoder
from tests.data.templates import (
    ALTERNATING,
    CHATML,
    HEADERS,
    NEXT_USER_ENDS,
    OPEN_THINK,
    PLAIN,
    THINK,
)

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "It is  four, of course."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "five é漢🤖\n\n"},
]


def thinking(text):
    """An answer with a think span before it."""
    return f"<think>\nreason\n</think>\n\n{text}"


def supervised(encoder, messages):
    """Texts of the maximal runs of supervised tokens."""
    encoded = encoder.encode(messages)
    edges = np.flatnonzero(np.diff(np.r_[False, encoded.mask, False]))
    return [
        encoder.tokenizer.decode(encoded.ids[start:end], clean_up_tokenization_spaces=False)
        for start, end in edges.reshape(-1, 2)
    ]


CASES = {
    "chatml": (
        CHATML,
        "<|im_end|>",
        ["It is  four, of course.<|im_end|>", "five é漢🤖\n\n<|im_end|>"],
    ),
    # A base model's tokenizer: its eos is not what ends a turn.
    "chatml, other eos": (
        CHATML,
        "<|endoftext|>",
        ["It is  four, of course.<|im_end|>", "five é漢🤖\n\n<|im_end|>"],
    ),
    "headers, trimmed": (
        HEADERS,
        "<|eot_id|>",
        ["It is  four, of course.<|eot_id|>", "five é漢🤖<|eot_id|>"],
    ),
    "think": (
        THINK,
        "<|im_end|>",
        ["It is  four, of course.<|im_end|>", "<think>\n\n</think>\n\nfive é漢🤖\n\n<|im_end|>"],
    ),
    "prompt opens thinking": (
        OPEN_THINK,
        "</s>",
        ["It is  four, of course.</s>", "five é漢🤖\n\n</s>"],
    ),
    "words, blanks around": (
        PLAIN,
        "</s>",
        [" It is  four, of course. </s>", " five é漢🤖\n\n </s>"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_exactly_the_assistant_and_its_end_token(make_tokenizer, case):
    """Several turns, a system message, blanks at the edges, bytes split over tokens."""
    template, eos, expected = CASES[case]
    encoder = ChatEncoder(make_tokenizer(template, eos))
    assert supervised(encoder, TWO_TURNS) == expected
    assert supervised(encoder, TWO_TURNS[:3]) != []
    assert supervised(encoder, TWO_TURNS[:2]) == []


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_the_tokenizer(make_tokenizer, case):
    """What is trained on is what the tokenizer itself makes of the conversation."""
    template, eos, _ = CASES[case]
    tokenizer = make_tokenizer(template, eos)
    encoder = ChatEncoder(tokenizer)
    ids = tokenizer.apply_chat_template(TWO_TURNS, return_dict=True)["input_ids"]
    assert encoder.encode(TWO_TURNS).ids.tolist() == ids
    ids = tokenizer.apply_chat_template(
        TWO_TURNS[:4], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert encoder.prompt_ids(TWO_TURNS[:4]) == ids


def test_f17_both_ends(make_tokenizer):
    """F17: the first supervised token is the one after the prompt, the last is the end token."""
    encoder = ChatEncoder(make_tokenizer(CHATML, "<|im_end|>"))
    encoded = encoder.encode(TWO_TURNS[:3])
    prompt = encoder.prompt_ids(TWO_TURNS[:2])
    assert encoded.ids[: len(prompt)].tolist() == prompt
    assert np.flatnonzero(encoded.mask).tolist() == list(range(len(prompt), len(encoded.ids) - 1))
    end = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert encoded.ids[encoded.mask][-1] == end  # the line end after it is the template's


def test_f25_thinking_is_supervised_where_it_is_rendered(make_tokenizer):
    """F25: thinking of the last answer is trained on; of an earlier one it is not in the text."""
    encoder = ChatEncoder(make_tokenizer(THINK, "<|im_end|>"))
    messages = [
        TWO_TURNS[1],
        {"role": "assistant", "content": thinking("four")},
        TWO_TURNS[3],
        {"role": "assistant", "content": thinking("five")},
    ]
    assert supervised(encoder, messages) == [
        "four<|im_end|>",
        "<think>\nreason\n</think>\n\nfive<|im_end|>",
    ]


def test_template_options_move_the_start(make_tokenizer):
    """With thinking off the prompt holds the empty block, so it is not the assistant's."""
    encoder = ChatEncoder(make_tokenizer(THINK, "<|im_end|>"), enable_thinking=False)
    assert supervised(encoder, TWO_TURNS) == [
        "It is  four, of course.<|im_end|>",
        "five é漢🤖\n\n<|im_end|>",
    ]


def test_answer_ended_by_the_next_speakers_token(make_tokenizer):
    """Only where the target stops at that token; the last answer has none in the text."""
    tokenizer = make_tokenizer(NEXT_USER_ENDS, "<|endoftext|>")
    messages = [*TWO_TURNS[1:4], {"role": "assistant", "content": "five"}]
    stop = tokenizer.convert_tokens_to_ids("<|user|>")
    assert supervised(ChatEncoder(tokenizer, [stop]), messages) == [
        "\nIt is  four, of course.<|user|>",
        "\nfive",
    ]
    assert supervised(ChatEncoder(tokenizer), messages)[0] == "\nIt is  four, of course."


def test_answers_that_look_like_the_prompt(make_tokenizer):
    """Equal, empty and template-like texts are told apart by place, not by search."""
    encoder = ChatEncoder(make_tokenizer(CHATML, "<|im_end|>"))
    answers = ["assistant\n", "", "Two and two?", "answer answerx"]
    messages = [
        message
        for answer in answers
        for message in (TWO_TURNS[1], {"role": "assistant", "content": answer})
    ]
    assert supervised(encoder, messages) == [answer + "<|im_end|>" for answer in answers]


def test_the_end_of_a_cut_answer_was_never_said(make_tokenizer):
    """An answer that ran into the token limit does not teach to stop there."""
    encoder = ChatEncoder(make_tokenizer(CHATML, "<|im_end|>"))
    cut = {**TWO_TURNS[2], "finish_reason": "length"}
    ended = {**TWO_TURNS[2], "finish_reason": "stop"}
    assert supervised(encoder, [TWO_TURNS[1], cut, TWO_TURNS[3], ended]) == [
        "It is  four, of course.",
        "It is  four, of course.<|im_end|>",
    ]


def test_tool_calls_belong_to_the_answer(make_tokenizer):
    """What a template renders of a tool call is said by the assistant."""
    template = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% if m.tool_calls %}[call]{% endif %}"
    )
    encoder = ChatEncoder(make_tokenizer(template, "<|im_end|>"))
    call = {"role": "assistant", "content": "see ", "tool_calls": [{"name": "f"}]}
    assert supervised(encoder, [TWO_TURNS[1], call]) == ["see [call]<|im_end|>"]


def test_no_chat_template(make_tokenizer):
    """A clear refusal; a template given by hand helps."""
    tokenizer = make_tokenizer(None, "</s>")
    with pytest.raises(DataError, match="no chat template"):
        ChatEncoder(tokenizer)
    encoder = ChatEncoder(tokenizer, chat_template=PLAIN)
    assert supervised(encoder, TWO_TURNS[1:3]) == [" It is  four, of course. </s>"]


def test_template_errors_are_named(make_tokenizer):
    """What the template refuses, and a template that hides the answer."""
    encoder = ChatEncoder(make_tokenizer(ALTERNATING, "</s>"))
    with pytest.raises(DataError, match="system role not supported"):
        encoder.encode(TWO_TURNS)
    silent = ChatEncoder(make_tokenizer("{{ messages | length }}", "</s>"))
    with pytest.raises(DataError, match="hides where message 1"):
        silent.encode(TWO_TURNS[1:3])
