"""The answer reward and what a gold answer may be."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_sspo.environment import Reward, answer_reward, parse_gold, score
from nemo_sspo.errors import UserError


def reward(answer: str, gold: str) -> float:
    return answer_reward(f"<think>x</think><answer>{answer}</answer>", gold)


RIGHT = [
    ("42", "42"),
    (" 42\n", "42"),
    ("042", "42"),
    ("42.", "42"),
    ("42.0", "42"),
    ("+42", "42"),
    ("$42", "42"),
    ("42%", "42"),
    ("1,242", "1242"),
    ("1242", "1,242"),
    ("1{,}242", "1242"),
    ("1\\,242", "1242"),
    ("$1,242.50", "1242.5"),
    ("-7", "-7"),
    ("\N{MINUS SIGN}7", "-7"),
    ("-$7", "-7"),
    ("$-7", "-7"),
    (".5", "0.5"),
    ("1/2", "0.5"),
    ("2/4", "1/2"),
    ("-3/4", "-0.75"),
    ("\\frac{1}{2}", "0.5"),
    ("-\\dfrac{1}{2}", "-1/2"),
    ("\\frac{-1}{2}", "-1/2"),
    ("1e3", "1000"),
    ("42", "some reasoning\n#### 42"),
    ("#### 42", "42"),
    ("\\boxed{42}", "42"),
    ("$\\boxed{42}$", "42"),
    ("\\(42\\)", "42"),
    ("\\text{42}", "42"),
    ("42 \\text{ cm}", "42"),
    ("b", "B"),
    ("(B)", "B"),
    ("B", "(B)"),
    ("monday.", "Monday"),
    ("\\text{Monday}", "Monday"),
    ("1+x", "x+1"),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\sqrt{12}", "2\\sqrt{3}"),
    ("\\frac{1}{\\sqrt{2}}", "$\\frac{\\sqrt{2}}{2}$"),
    ("3", "x=3"),
    ("\\{2,1\\}", "\\{1,2\\}"),
    ("(1,2)", "(1, 2)"),
    ("3 or 2", "\\{2,3\\}"),
]


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_right(answer, gold):
    assert reward(answer, gold) == 1.0
    assert parse_gold(gold)


WRONG = [
    ("43", "42"),
    ("-42", "42"),
    ("4 2", "42"),
    ("41 42", "42"),
    ("41, 42", "42"),
    ("42 or 43", "42"),
    ("1,24", "124"),
    ("12,42", "1242"),
    ("42.01", "42"),
    ("0.3333", "1/3"),
    ("50%", "0.5"),
    ("1/0", "1"),
    ("1e9999", "1"),
    ("", "42"),
    (".", "42"),
    ("$", "42"),
    ("x", "42"),
    ("\N{ARABIC-INDIC DIGIT FOUR}", "4"),
    ("785+457", "1242"),  # the question, copied
    ("785+457=1242", "1242"),
    ("\\boxed{785+457}", "1242"),
    ("84/2", "42"),
    ("\\frac{84}{2}", "42"),
    ("2^3", "8"),
    ("A", "B"),
    ("A or B", "B"),
    ("not Monday", "Monday"),
    ("x+2", "x+1"),
    ("X", "x+1"),
    ("(2,1)", "(1,2)"),
    ("x^2 or y^2", "x^2+0"),
    ("5$ or $1+x", "x+1"),
    ("5$. \\[1+x\\] $", "x+1"),
    ("\\(5\\) or \\(1+x\\)", "x+1"),
    ("x+1 I think so", "x+1"),
    ("x+1}{", "x+1"),
    ("\\frac{", "x+1"),
    ("\x00\ud800", "x+1"),
    ("7" * 5000, "7"),
    ("(" * 60, "x+1"),
]


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_wrong(answer, gold):
    assert reward(answer, gold) == 0.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<answer>42</answer>", 1.0),
        ("42", 0.0),
        ("<answer>42", 0.0),
        ("42</answer>", 0.0),
        ("<answer>41</answer><answer>42</answer>", 1.0),
        ("<answer>42</answer><answer>41</answer>", 0.0),
        ("<answer>42</answer><answer>41", 1.0),
        ("<answer>41<answer>42</answer>", 1.0),
        ("<think><answer>42</answer></think>", 1.0),
    ],
)
def test_the_last_complete_answer_counts(response, value):
    assert answer_reward(response, "42") == value


@settings(deadline=None)
@given(st.text(max_size=40))
def test_garbage_never_raises(text):
    assert reward(text, "42") in (0.0, 1.0)


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_are_compared_as_numbers(a, b):
    assert reward(f"{a:,}", str(b)) == float(a == b)
    assert reward(f"{a:,}", str(a)) == 1.0


@settings(deadline=None)
@given(st.fractions(max_denominator=1000))
def test_fractions_and_decimals_are_exact(value):
    text = f"{value.numerator}/{value.denominator}"
    assert reward(text, text) == 1.0
    nearby = value + Fraction(1, 10**9)
    assert reward(f"{nearby.numerator}/{nearby.denominator}", text) == 0.0


def test_in_another_thread():
    seen = []
    pairs = [("z+1", "1+z"), ("z+2", "1+z")]
    thread = threading.Thread(target=lambda: seen.extend(reward(*pair) for pair in pairs))
    thread.start()
    thread.join()
    assert seen == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("42", "42"),
        (" 42 ", "42"),
        ("Half of 48 is 24.\n#### 1,024", "1,024"),
        ("#### 3 #### 4", "4"),
        ("x+1", "x+1"),
        ("2 or 3", "2 or 3"),
        ("\\mathrm{e}^2+\\mathrm{e}", "\\mathrm{e}^2+\\mathrm{e}"),
        ("3 \\sqrt{2} \\text{ metres}", "3 \\sqrt{2} \\text{ metres}"),
        ("yes", "yes"),
    ],
)
def test_parse_gold(text, gold):
    assert parse_gold(text) == gold


@pytest.mark.parametrize(
    "text",
    ["???", "forty two", "3 apples", "not a number", "x+", "}{", "$", "...", "nan", "I do not know", "x$ or $y"],
)
def test_a_gold_answer_that_cannot_be_verified(text):
    with pytest.raises(UserError, match=r"can't be verified; allowed: a number, .* '#### answer'") as error:
        parse_gold(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "  ", "reasoning ####", "reasoning #### \n"])
def test_an_empty_gold_answer(text):
    with pytest.raises(UserError, match="the answer is empty; allowed: "):
        parse_gold(text)


def test_a_gold_answer_that_is_too_long():
    with pytest.raises(UserError, match="has 1001 characters, at most 1000"):
        parse_gold("1" * 1001)


def test_score():
    right, empty = "<think>a</think><answer>5</answer>", ""
    rewards = score([right, right, "<answer>5</answer>", empty], ["5", "6", "5", "5"])
    assert rewards == [Reward(1.0, 1.0), Reward(0.0, 1.0), Reward(1.0, 0.25), Reward(0.0, 0.0)]
    assert [r.total for r in rewards] == [2.0, 1.0, 1.25, 0.0]
    assert score([], []) == []
    with pytest.raises(ValueError, match="2 responses but 1 gold answers"):
        score(["a", "b"], ["1"])
