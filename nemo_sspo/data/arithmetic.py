"""Seeded arithmetic problems with worked think blocks.

Each task numbers its problems from 0 to `count` - 1 or draws them from reasoning-gym; either way a split is a slice of
one list of distinct problems, so that train, validation and test share none.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import isqrt

from nemo_sspo.config.schema import SyntheticDataConfig
from nemo_sspo.data.problem import Problem
from nemo_sspo.data.tokenizer import TAGS
from nemo_sspo.errors import UserError

MAX_DIGITS = 12


def work_addition(a: int, b: int) -> tuple[str, int]:
    """The think block and the sum: the columns from the units, ``digit+digit+carry=sum``.

    ``457+785`` is ``7+5+0=12,5+8+1=14,4+7+1=12``: the answer 1242 is the last sum and the last digits before it.
    """
    columns, carry = [], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        columns.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return ",".join(columns), a + b


def work_subtraction(a: int, b: int) -> tuple[str, int]:
    """The think block and the difference of a >= b: the columns from the units, ``digit-digit-borrow=digit``.

    A digit that borrows is written with its ten: ``785-457`` is ``15-7-0=8,8-5-1=2,7-4-0=3``. The answer 328 is the
    results from last to first, without zeros in front.
    """
    columns, borrow = [], 0
    for x, y in _columns(a, b):
        lent = 10 if x < y + borrow else 0
        columns.append(f"{x + lent}-{y}-{borrow}={x + lent - y - borrow}")
        borrow = lent // 10
    return ",".join(columns), a - b


def work_chain_sum(first: int, steps: list[tuple[str, int]]) -> tuple[str, int]:
    """The think block and the result of ``first op term op term ...``: its running totals.

    ``12+34-50`` is ``12+34=46,46-50=-4``.
    """
    worked, total = [], first
    for sign, term in steps:
        result = total + term if sign == "+" else total - term
        worked.append(f"{total}{sign}{term}={result}")
        total = result
    return ",".join(worked), total


def _columns(a: int, b: int) -> Iterator[tuple[int, int]]:
    width = max(len(str(a)), len(str(b)))
    for x, y in zip(reversed(f"{a:0{width}}"), reversed(f"{b:0{width}}"), strict=True):
        yield int(x), int(y)


def _bounds(min_digits: int, max_digits: int) -> tuple[int, int]:
    """The smallest number of `min_digits` digits, and how many numbers there are from it to `max_digits` digits."""
    low = 0 if min_digits == 1 else 10 ** (min_digits - 1)
    return low, 10**max_digits - low


# A draw is a stream of (question, think block, answer) in which every problem comes up; questions may repeat.
_Draw = Callable[[random.Random, int, int], Iterator[tuple[str, str, int]]]


def _draw_addition(rng: random.Random, min_digits: int, max_digits: int) -> Iterator[tuple[str, str, int]]:
    low, size = _bounds(min_digits, max_digits)
    for index in _draw_indices(rng, size * size):
        a, b = low + index // size, low + index % size
        yield f"{a}+{b}=", *work_addition(a, b)


def _draw_subtraction(rng: random.Random, min_digits: int, max_digits: int) -> Iterator[tuple[str, str, int]]:
    low, size = _bounds(min_digits, max_digits)
    for index in _draw_indices(rng, size * (size + 1) // 2):
        row = (isqrt(8 * index + 1) - 1) // 2  # row r of the triangle holds the pairs (r, 0) .. (r, r)
        a, b = low + row, low + index - row * (row + 1) // 2
        yield f"{a}-{b}=", *work_subtraction(a, b)


def _draw_chain_sum(rng: random.Random, min_digits: int, max_digits: int) -> Iterator[tuple[str, str, int]]:
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset  # takes seconds to import

    config = ChainSumConfig(
        min_terms=2, max_terms=3, min_digits=min_digits, max_digits=max_digits, seed=rng.getrandbits(62), size=1
    )
    source, index = ChainSumDataset(config), 0
    while True:
        first, *rest = source[index]["metadata"]["expression"].split()
        steps = [(sign, int(term)) for sign, term in zip(rest[::2], rest[1::2], strict=True)]
        yield "".join([first, *rest, "="]), *work_chain_sum(int(first), steps)
        index += 1


def _draw_indices(rng: random.Random, count: int) -> Iterator[int]:
    """Every index below `count`: once each in a random order if they are few, else drawn with repeats."""
    if count <= 100_000:
        yield from rng.sample(range(count), count)
        return
    while True:
        yield rng.randrange(count)


def _count_chain_sum(min_digits: int, max_digits: int) -> int:
    """All terms of a problem have the same number of digits; reasoning-gym draws it, the terms and the signs."""
    sizes = [_bounds(digits, digits)[1] for digits in range(min_digits, max_digits + 1)]
    return sum(size**2 * 2 + size**3 * 4 for size in sizes)


@dataclass(frozen=True)
class Task:
    """A kind of problem: how many there are of `min_digits` to `max_digits` digits, and how they are drawn."""

    count: Callable[[int, int], int]
    draw: _Draw


TASKS = {
    "addition": Task(lambda low, high: _bounds(low, high)[1] ** 2, _draw_addition),
    "subtraction": Task(lambda low, high: (n := _bounds(low, high)[1]) * (n + 1) // 2, _draw_subtraction),
    "chain_sum": Task(_count_chain_sum, _draw_chain_sum),
}


def generate_problems(config: SyntheticDataConfig, seed: int) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Train, validation and test problems, all distinct, each with a clean worked response.

    They depend on `config`'s task, digits and numbers of problems and on `seed` only; test does not change with the
    number of train problems. UserError for an unknown task, bad digits or more problems than there are.
    """
    key = "model.data.synthetic"
    _check(config, key)
    task = TASKS[config.task]
    wanted = config.num_train + config.num_validation + config.num_test
    count = task.count(config.min_digits, config.max_digits)
    if wanted > count:
        raise UserError(
            f"{key}: num_train + num_validation + num_test is {wanted}, but there are only {count} problems of task "
            f"{config.task} with {config.min_digits} to {config.max_digits} digits; ask for fewer or raise max_digits"
        )
    rng = random.Random(f"{seed}/{config.task}/{config.min_digits}/{config.max_digits}")
    problems: dict[str, Problem] = {}
    for question, think, answer in task.draw(rng, config.min_digits, config.max_digits):
        response = f"<think>{think}</think><answer>{answer}</answer>"
        problems[question] = Problem(question, str(answer), response, f"generated problem {question!r}")
        if len(problems) == wanted:
            break
    drawn = iter(problems.values())
    test, validation = list(islice(drawn, config.num_test)), list(islice(drawn, config.num_validation))
    return list(drawn), validation, test


def spoil_responses(problems: list[Problem], config: SyntheticDataConfig, seed: int) -> list[str]:
    """Worked responses of mixed quality for the cold start, one for each problem (each has a response).

    Problem number i loses what its think block says with probability ``empty_think_even`` or ``empty_think_odd``, and
    one of its four tags, any of them, with probability ``missing_tag``.
    """
    rng = random.Random(f"{seed}/cold start")
    responses = []
    for number, problem in enumerate(problems):
        response = problem.response
        assert response is not None
        empty, no_tag, tag = rng.random(), rng.random(), rng.choice(TAGS)
        if empty < (config.empty_think_odd if number % 2 else config.empty_think_even):
            response = "<think></think>" + response.split("</think>", 1)[1]
        if no_tag < config.missing_tag:
            response = response.replace(tag, "", 1)
        responses.append(response)
    return responses


def _check(config: SyntheticDataConfig, key: str) -> None:
    if config.task not in TASKS:
        raise UserError(f"{key}.task is {config.task!r}; allowed: {', '.join(TASKS)}")
    if not 1 <= config.min_digits <= config.max_digits <= MAX_DIGITS:
        raise UserError(
            f"{key}.min_digits and max_digits are {config.min_digits} and {config.max_digits}; "
            f"allowed: 1 <= min_digits <= max_digits <= {MAX_DIGITS}"
        )
    for name in ("num_train", "num_validation", "num_test"):
        if getattr(config, name) < 1:
            raise UserError(f"{key}.{name} is {getattr(config, name)}; at least 1 is needed")
    for name in ("empty_think_even", "empty_think_odd", "missing_tag"):
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"{key}.{name} is {getattr(config, name)}; allowed: a probability, 0 to 1")
