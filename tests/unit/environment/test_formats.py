"""The format reward, grade by grade."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_sspo.environment import format_reward, uses_think_block

CASES = {
    "exact": ("<think>a</think><answer>1</answer>", 1.0),
    "empty think": ("<think></think><answer>1</answer>", 1.0),
    "empty answer": ("<think>a</think><answer></answer>", 1.0),
    "white space around the blocks": (" <think>a</think>\n<answer>1</answer>\n", 1.0),
    "several lines in a block": ("<think>a\nb</think><answer>1\n2</answer>", 1.0),
    "text before": ("so <think>a</think><answer>1</answer>", 0.5),
    "text between": ("<think>a</think> so <answer>1</answer>", 0.5),
    "text after": ("<think>a</think><answer>1</answer> so", 0.5),
    "two answers": ("<think>a</think><answer>1</answer><answer>1</answer>", 0.5),
    "two thinks": ("<think>a</think><think>b</think><answer>1</answer>", 0.5),
    "an answer in the think block": ("<think><answer>1</answer></think><answer>1</answer>", 0.5),
    "a second opening tag": ("<think><think>a</think><answer>1</answer>", 0.5),
    "a stray closing tag": ("<think>a</think><answer>1</answer></answer>", 0.5),
    "wrong order": ("<answer>1</answer><think>a</think>", 0.25),
    "answer only": ("<answer>1</answer>", 0.25),
    "think only": ("<think>a</think>", 0.25),
    "no <think>": ("a</think><answer>1</answer>", 0.25),
    "no </think>": ("<think>a<answer>1</answer>", 0.25),
    "no <answer>": ("<think>a</think>1</answer>", 0.25),
    "no </answer>": ("<think>a</think><answer>1", 0.25),
    "answer inside think": ("<think>a<answer>1</answer></think>", 0.25),
    "empty": ("", 0.0),
    "plain text": ("1242", 0.0),
    "opening tags only": ("<think>a<answer>1", 0.0),
    "closing before opening": ("</think><think></answer><answer>", 0.0),
    "other case": ("<THINK>a</THINK><ANSWER>1</ANSWER>", 0.0),
}


@pytest.mark.parametrize(("response", "grade"), CASES.values(), ids=CASES.keys())
def test_format_reward(response, grade):
    assert format_reward(response) == grade


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "1", " ", "+"]), max_size=12)


@settings(deadline=None)
@given(PIECES.map("".join))
def test_every_text_has_a_grade_and_only_the_exact_form_has_the_best(response):
    grade = format_reward(response)
    assert grade in (0.0, 0.25, 0.5, 1.0)
    tags = [tag for tag in response.replace(">", ">\n").replace("<", "\n<").split("\n") if tag.startswith("<")]
    outside = response.split("<think>")[0] + response.split("</answer>")[-1]
    between = response.partition("</think>")[2].partition("<answer>")[0]
    exact = tags == ["<think>", "</think>", "<answer>", "</answer>"] and not (outside + between).strip()
    assert (grade == 1.0) == exact


def test_a_long_response_of_tags_is_graded_at_once():
    assert format_reward("<think><answer>" * 5000) == 0.0
    assert format_reward("<think></think><answer>" * 5000) == 0.25


@pytest.mark.parametrize(
    ("response", "uses"),
    [
        ("<think>7+5=12</think><answer>12</answer>", True),
        ("<think></think><answer>12</answer>", False),
        ("<think> \n</think><answer>12</answer>", False),
        ("<think>7+5=12<answer>12</answer>", False),
        ("<answer>12</answer>", False),
        ("<think></think><think>a</think>", False),
    ],
)
def test_uses_think_block(response, uses):
    assert uses_think_block(response) is uses
