"""Right answers by hand."""

from __future__ import annotations

import pytest

from specjax.evaluation.answers import final_answer, is_right


@pytest.mark.parametrize(
    ("text", "final"),
    [
        (r"first \boxed{1}, no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("so 3 eggs.\n#### 18", "18"),
        (" yes\n", "yes"),
        (r"cut off: \boxed{12", r"cut off: \boxed{12"),
    ],
)
def test_final_answer(text: str, final: str) -> None:
    assert final_answer(text) == final


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (r"\boxed{1,234}", "1234", True),
        (r"\boxed{\$18.00}", "eggs\n#### 18", True),
        (r"\boxed{ \text{Monday}. }", "Monday", True),
        (r"\boxed{\left(1, 2\right)}", "(1,2)", True),
        (r"\boxed{1/2}", "0.5", False),
        (r"\boxed{18}", "180", False),
        ("18", "18 eggs", False),
        ("", "0", False),
    ],
)
def test_is_right(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) is right
