"""The generated problems: true in every column, distinct, and a function of seed and configuration."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_sspo.config.schema import SyntheticDataConfig
from nemo_sspo.data import TASKS, ArithmeticTokenizer, generate_problems
from nemo_sspo.data.__main__ import main
from nemo_sspo.data.arithmetic import spoil_responses, work_addition, work_chain_sum, work_subtraction
from nemo_sspo.environment import answer_reward, format_reward, uses_think_block
from nemo_sspo.errors import UserError

NUMBERS = st.integers(0, 10**9)
EXAMPLES = Path(__file__).parents[3] / "examples" / "data"


def small(**options) -> SyntheticDataConfig:
    return SyntheticDataConfig(**{"num_train": 40, "num_validation": 8, "num_test": 8, **options})


def test_worked_by_value():
    assert work_addition(457, 785) == ("7+5+0=12,5+8+1=14,4+7+1=12", 1242)
    assert work_addition(99, 1) == ("9+1+0=10,9+0+1=10", 100)
    assert work_addition(0, 0) == ("0+0+0=0", 0)
    assert work_subtraction(785, 457) == ("15-7-0=8,8-5-1=2,7-4-0=3", 328)
    assert work_subtraction(100, 1) == ("10-1-0=9,10-0-1=9,1-0-1=0", 99)
    assert work_subtraction(5, 5) == ("5-5-0=0", 0)
    assert work_chain_sum(12, [("+", 34), ("-", 50)]) == ("12+34=46,46-50=-4", -4)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_addition_columns(a, b):
    think, answer = work_addition(a, b)
    columns = [tuple(map(int, re.fullmatch(r"(\d)\+(\d)\+(\d)=(\d+)", c).groups())) for c in think.split(",")]  # type: ignore[union-attr]
    assert answer == a + b
    assert all(x + y + carry == total for x, y, carry, total in columns)
    assert columns[0][2] == 0
    assert all(total // 10 == carry for (*_, total), (_, _, carry, _) in pairwise(columns))
    assert int("".join(str(x) for x, *_ in reversed(columns))) == a
    assert int("".join(str(y) for _, y, *_ in reversed(columns))) == b
    totals = [str(total) for *_, total in reversed(columns)]
    assert totals[0] + "".join(total[-1] for total in totals[1:]) == str(answer)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_subtraction_columns(a, b):
    a, b = max(a, b), min(a, b)
    think, answer = work_subtraction(a, b)
    columns = [tuple(map(int, re.fullmatch(r"(\d+)-(\d)-(\d)=(\d)", c).groups())) for c in think.split(",")]  # type: ignore[union-attr]
    assert answer == a - b
    assert all(x - y - borrow == result for x, y, borrow, result in columns)
    assert columns[0][2] == 0
    assert columns[-1][0] < 10
    assert all((x >= 10) == (borrow == 1) for (x, *_), (_, _, borrow, _) in pairwise(columns))
    assert int("".join(str(x % 10) for x, *_ in reversed(columns))) == a
    assert int("".join(str(result) for *_, result in reversed(columns))) == answer


@settings(deadline=None)
@given(NUMBERS, st.lists(st.tuples(st.sampled_from("+-"), NUMBERS), min_size=1, max_size=4))
def test_chain_sum_steps(first, steps):
    think, answer = work_chain_sum(first, steps)
    assert answer == first + sum(term if sign == "+" else -term for sign, term in steps)
    results = []
    for step, before, (sign, term) in zip(think.split(","), [first, *results], steps, strict=False):
        assert step.startswith(f"{before}{sign}{term}=")
        results.append(int(step.split("=")[1]))
    assert think.endswith(f"={answer}")
    assert all(eval(left) == int(right) for left, right in (s.split("=") for s in think.split(",")))


@pytest.mark.parametrize("task", TASKS)
def test_generated_problems(task):
    config, tokenizer = small(task=task, num_train=2000), ArithmeticTokenizer()
    train, validation, test = generate_problems(config, 5)
    assert (len(train), len(validation), len(test)) == (2000, 8, 8)
    problems = [*train, *validation, *test]
    assert len({p.question for p in problems}) == len(problems)
    for problem in problems:
        assert problem.question.endswith("=")
        assert eval(problem.question[:-1]) == int(problem.answer)
        assert all(2 <= len(number) <= 3 for number in re.findall(r"\d+", problem.question))
        assert problem.response is not None
        assert format_reward(problem.response) == 1.0
        assert uses_think_block(problem.response)
        assert answer_reward(problem.response, problem.answer) == 1.0
        assert tokenizer.decode(tokenizer.encode(problem.response)) == problem.response
    assert generate_problems(config, 5) == (train, validation, test)
    assert generate_problems(config, 6)[0] != train


def test_addition_by_value():
    train, _, test = generate_problems(small(), 1234)
    assert [p.question for p in train[:3]] == ["929+914=", "825+753=", "517+581="]
    assert [p.question for p in test[:3]] == ["804+78=", "195+834=", "953+448="]


def test_neighbouring_seeds_share_few_problems():
    for task in TASKS:
        first, second = (
            {p.question for p in generate_problems(small(task=task, min_digits=3), seed)[0]} for seed in (1, 2)
        )
        assert len(first & second) <= 2, task


def test_the_test_split_does_not_depend_on_how_much_is_trained_on():
    for task in TASKS:
        assert generate_problems(small(task=task), 3)[2] == generate_problems(small(task=task, num_train=400), 3)[2]


@pytest.mark.parametrize(("task", "count"), [("addition", 100), ("subtraction", 55), ("chain_sum", 4200)])
def test_every_problem_there_is_and_not_one_more(task, count):
    config = small(task=task, min_digits=1, max_digits=1, num_train=count - 16)
    problems = [p for split in generate_problems(config, 0) for p in split]
    assert len({p.question for p in problems}) == count
    config.num_train += 1
    with pytest.raises(UserError, match=rf"num_train .* is {count + 1}, but there are only {count} problems of task"):
        generate_problems(config, 0)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(["addition", "subtraction"]), st.integers(1, 4))
def test_splits_are_disjoint(seed, task, digits):
    splits = generate_problems(small(task=task, num_train=20, min_digits=1, max_digits=digits), seed)
    questions = [p.question for split in splits for p in split]
    assert len(set(questions)) == len(questions) == 36


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "division"}, "model.data.synthetic.task is 'division'; allowed: addition, subtraction, chain_sum"),
        ({"min_digits": 0}, "min_digits and max_digits are 0 and 3; allowed: 1 <= min_digits <= max_digits <= 12"),
        ({"min_digits": 4}, "min_digits and max_digits are 4 and 3"),
        ({"max_digits": 13}, "min_digits and max_digits are 2 and 13"),
        ({"num_train": 0}, "model.data.synthetic.num_train is 0; at least 1 is needed"),
        ({"num_test": -1}, "model.data.synthetic.num_test is -1"),
        ({"missing_tag": 1.5}, "model.data.synthetic.missing_tag is 1.5; allowed: a probability, 0 to 1"),
        ({"empty_think_even": float("nan")}, "model.data.synthetic.empty_think_even is nan"),
    ],
)
def test_bad_configuration(options, message):
    with pytest.raises(UserError) as error:
        generate_problems(small(**options), 0)
    assert message in str(error.value)


def test_large_numbers():
    train, _, _ = generate_problems(small(min_digits=12, max_digits=12), 0)
    assert len(train) == 40
    assert all(eval(p.question[:-1]) == int(p.answer) for p in train)


def test_spoiled_responses_by_number():
    config = small(num_train=8000)
    train, _, _ = generate_problems(config, 1)
    spoiled = spoil_responses(train, config, 1)
    empty = [not uses_think_block(r) for r in spoiled if r.count("<think>") == r.count("</think>") == 1]
    assert len(spoiled) == 8000
    assert abs(sum("<think></think>" in r for r in spoiled[::2]) / 4000 - 0.75 * 0.95) < 0.03
    assert abs(sum("<think></think>" in r for r in spoiled[1::2]) / 4000 - 0.25 * 0.95) < 0.03
    assert 0.45 < sum(empty) / len(empty) < 0.55
    missing = [[tag for tag in ("<think>", "</think>", "<answer>", "</answer>") if tag not in r] for r in spoiled]
    assert {len(m) for m in missing} == {0, 1}
    assert abs(sum(map(len, missing)) / 8000 - 0.10) < 0.015
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert abs(sum(m == [tag] for m in missing) / 8000 - 0.025) < 0.01
    assert spoil_responses(train, config, 1) == spoiled
    assert spoil_responses(train, config, 2) != spoiled


def test_spoiled_responses_at_the_limits():
    train, _, _ = generate_problems(small(), 1)
    clean = spoil_responses(train, small(empty_think_even=0.0, empty_think_odd=0.0, missing_tag=0.0), 1)
    assert clean == [p.response for p in train]
    even_only = spoil_responses(train, small(empty_think_even=1.0, empty_think_odd=0.0, missing_tag=0.0), 1)
    assert [uses_think_block(r) for r in even_only] == [False, True] * 20
    assert even_only[0] == f"<think></think><answer>{train[0].answer}</answer>"
    assert all(format_reward(r) == 0.25 for r in spoil_responses(train, small(missing_tag=1.0), 1))


def test_the_examples_are_made_again_byte_for_byte(tmp_path):
    recipe = (EXAMPLES / "README.md").read_text().split("python -m nemo_sspo.data examples/data ")[1]
    assert main([str(tmp_path), *recipe.replace("\\\n", " ").split()]) == 0
    names = sorted(path.name for path in EXAMPLES.glob("*.jsonl"))
    assert names == ["test.jsonl", "train.jsonl", "validation.jsonl"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / name).read_bytes()


def test_the_command_refuses(tmp_path, capsys):
    assert main([str(tmp_path / "a"), "--task", "division"]) == 2
    assert "allowed: addition, subtraction, chain_sum" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "b")]) == 2
    assert "can't be written" in capsys.readouterr().err
