"""Masks decoded back, for the kinds of templates in use and contents of any characters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.core.errors import DataError
from specjax.data.chat import ChatEncoder
from specjax.data.templates import BUILT_IN, read_template
from specjax.data.thinking import think_spans
from tests.data.templates import (
    CHATML,
    GEMMA,
    HEADERS,
    INST,
    MARKED,
    MARKED_INSIDE,
    OPEN_THINK,
    THINK,
)

# template, end of turn, what precedes an answer's content, whether contents are trimmed.
KINDS = {
    "chatml": (CHATML, "<|im_end|>", "", False),
    "headers": (HEADERS, "<|eot_id|>", "", True),
    "gemma": (GEMMA, "<end_of_turn>", "", True),
    "inst": (INST, "</s>", " ", False),
    "marked": (MARKED, "<|im_end|>", "", False),
    "marked inside": (MARKED_INSIDE, "<|im_end|>", "", False),
}


def supervised(encoder, messages):
    """Texts of the maximal runs of supervised tokens."""
    encoded = encoder.encode(messages)
    edges = np.flatnonzero(np.diff(np.r_[False, encoded.mask, False]))
    return [
        encoder.tokenizer.decode(encoded.ids[start:end], clean_up_tokenization_spaces=False)
        for start, end in edges.reshape(-1, 2)
    ]


def turns(*texts, system=None):
    """Alternating user and assistant messages."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return start + [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# Odd characters, but no text that would be a special token by chance.
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="<>[]|"), min_size=1, max_size=12
).filter(lambda text: text.strip())


@pytest.mark.parametrize("kind", KINDS)
def test_any_answers_are_decoded_back(make_tokenizer, kind):
    """F17, F26: exactly the answers and their ends, over several turns."""
    template, eos, lead, trimmed = KINDS[kind]
    encoder = ChatEncoder(make_tokenizer(template, eos))

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.none() | TEXT)
    def check(pairs, system):
        messages = turns(*(text for pair in pairs for text in pair), system=system)
        said = [answer.strip() if trimmed else answer for _, answer in pairs]
        assert supervised(encoder, messages) == [f"{lead}{text}{eos}" for text in said]

    check()


@pytest.mark.parametrize("template", [MARKED, MARKED_INSIDE])
def test_marks_agree_with_rendering(make_tokenizer, template):
    """Two ways to find the answers, one mask; a cut answer's end is left out in both."""
    tokenizer = make_tokenizer(template, "<|im_end|>")
    messages = turns("Two and two?", "four  ", "And three?", "five é漢")
    messages[1]["finish_reason"] = "length"
    marks, found = ChatEncoder(tokenizer), ChatEncoder(tokenizer, use_marks=False)
    assert marks.encode(messages).mask.tolist() == found.encode(messages).mask.tolist()
    assert supervised(marks, messages) == ["four  ", "five é漢<|im_end|>"]
    # Without the flag the marks are what transformers itself takes.
    plain = turns("Two and two?", "four", "And three?", "five é漢")
    theirs = tokenizer.apply_chat_template(
        plain, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    if template is MARKED:
        assert marks.encode(plain).mask.astype(int).tolist() == theirs


def test_f25_thinking_is_supervised_or_excluded(make_tokenizer):
    """F25: the mask covers think block and answer when on; the answer alone when off."""
    tokenizer = make_tokenizer(THINK, "<|im_end|>")
    messages = turns("Two?", "<think>\nold\n</think>\n\nx", "3?", "<think>\nreason\n</think>\n\ny")
    on, off = ChatEncoder(tokenizer), ChatEncoder(tokenizer, supervise_thinking=False)
    assert supervised(on, messages)[1] == "<think>\nreason\n</think>\n\ny<|im_end|>"
    assert supervised(off, messages) == ["x<|im_end|>", "y<|im_end|>"]
    assert on.encode(messages).ids.tolist() == off.encode(messages).ids.tolist()


def test_think_spans():
    """Opened here or by the prompt, several, cut off, none."""
    assert think_spans("<think>a</think>\n\nb") == [(0, 18)]
    assert think_spans("a</think> b") == [(0, 10)]
    assert think_spans("<think>a</think>b<think>c</think>d") == [(0, 16), (17, 33)]
    assert think_spans("x <think>never ends") == [(2, 19)]
    assert think_spans("a < b") == []
    text = "a</think>b"
    assert think_spans(text)[0] == (0, text.index("b"))


def test_prompt_opens_the_thinking(make_tokenizer):
    """The history drops it, so what is rendered is the answer alone, on or off."""
    tokenizer = make_tokenizer(OPEN_THINK, "</s>")
    messages = turns("Two?", "reason</think>four")
    for on in (True, False):
        encoder = ChatEncoder(tokenizer, supervise_thinking=on)
        assert supervised(encoder, messages) == ["four</s>"]


def test_built_in_templates_for_tokenizers_without_one(make_tokenizer, tmp_path):
    """By name or from a file; a wrong name and a lacking token are told."""
    tokenizer = make_tokenizer(None, "</s>")
    messages = turns("Two?", "four", "3?", "five", system="Be brief.")
    for name, expected in {
        "chatml": ["four<|im_end|>", "five<|im_end|>"],
        "plain": [" four</s>", " five</s>"],
    }.items():
        template = read_template(name, tokenizer)
        stops = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
        encoder = ChatEncoder(tokenizer, stops, chat_template=template)
        assert supervised(encoder, messages) == expected
    (tmp_path / "mine.jinja").write_text(BUILT_IN["plain"])
    assert read_template(str(tmp_path / "mine.jinja"), tokenizer) == BUILT_IN["plain"]
    with pytest.raises(DataError, match=r"neither a file nor one of .*did you mean 'chatml'"):
        read_template("chatm", tokenizer)


def test_tool_messages_and_tools_are_rendered_but_not_supervised(make_tokenizer):
    """What a tool says is given; the schemas reach the template."""
    template = "{% if tools %}{{ tools[0].name }}\n{% endif %}" + CHATML
    encoder = ChatEncoder(make_tokenizer(template, "<|im_end|>"))
    messages = [
        *turns("Two?", "call"),
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "four"},
    ]
    encoded = encoder.encode(messages, [{"name": "adder"}])
    text = encoder.tokenizer.decode(encoded.ids)
    assert text.startswith("adder\n") and "result" in text
    assert supervised(encoder, messages) == ["call<|im_end|>", "four<|im_end|>"]
