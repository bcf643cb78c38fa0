"""The data of a run: train, validation, test and cold start, tokenised once."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from string import Formatter

from nemo_sspo.config.schema import DataConfig
from nemo_sspo.data.arithmetic import generate_problems, spoil_responses
from nemo_sspo.data.jsonl import load_jsonl
from nemo_sspo.data.problem import Problem
from nemo_sspo.data.tokenizer import Tokenizer
from nemo_sspo.errors import UserError

MIN_TO_SPLIT = 10  # problems that a train file needs before held-out ones are taken from it


@dataclass(frozen=True)
class EncodedProblem:
    """A problem as token ids. `sft_ids` is the worked response and its eos; only cold-start examples have one."""

    prompt_ids: list[int]
    gold: str
    question: str
    sft_ids: list[int] | None = None


@dataclass(frozen=True)
class Datasets:
    """The splits of a run. No question of `validation` or `test` is in another split.

    `sft` is empty where no train problem has a worked response. `notes` are lines that the user should see.
    """

    train: list[EncodedProblem]
    validation: list[EncodedProblem]
    test: list[EncodedProblem]
    sft: list[EncodedProblem]
    notes: tuple[str, ...] = ()


def build_datasets(
    config: DataConfig, tokenizer: Tokenizer, seed: int, encoder_seq_length: int, max_response_length: int
) -> Datasets:
    """Load or generate every split, check it, and tokenise it.

    - train: ``data_prefix.train``, else generated.
    - validation, test: their ``data_prefix``; else generated where train is; else held out from train, seeded, a tenth
      of its questions each, at most ``synthetic.num_validation`` and ``num_test``.
    - sft: ``data_prefix.sft``; else the train problems that have a worked response. Generated ones are of mixed
      quality (``synthetic.empty_think_*``, ``missing_tag``). Of those from train, the ones whose response is longer
      than `max_response_length` are left out; in ``data_prefix.sft`` such a response is an error.

    A question that one of the user's files shares with a held-out split is an error: a leaked test set makes every
    score worthless. Generated train problems that are in a held-out file are dropped.

    Lengths are in tokens, eos included. UserError for bad files, leaks, a template without ``{question}``, text that
    the tokenizer lacks, prompts and responses that don't fit.
    """
    _check_template(config.prompt_template)
    encoder = _Encoder(config.prompt_template, tokenizer, encoder_seq_length, max_response_length)
    train, validation, test, notes = _split(config, seed)
    named_sft = _load("sft", config.data_prefix.sft)
    leaks = [("train", train, "validation", validation), ("train", train, "test", test)]
    leaks += [("sft", named_sft or [], "validation", validation), ("sft", named_sft or [], "test", test)]
    for first, problems, second, held_out in [*leaks, ("validation", validation, "test", test)]:
        _check_disjoint(first, problems, second, held_out)
    if named_sft is not None:
        sft = encoder.worked(named_sft, [p.response for p in named_sft], must_fit=True)
    else:
        worked = [problem for problem in train if problem.response is not None]
        responses = [problem.response for problem in worked]
        if config.data_prefix.train is None:
            responses = spoil_responses(worked, config.synthetic, seed)
        sft = encoder.worked(worked, responses, must_fit=False)
        if len(sft) < len(worked):
            notes.append(
                f"{len(worked) - len(sft)} of {len(worked)} worked responses are longer than "
                f"model.grpo.length_params.max_length ({max_response_length}) and left out of the cold start"
            )
    encoded = (encoder.prompts(split) for split in (train, validation, test))
    return Datasets(*encoded, sft=sft, notes=tuple(notes))


def _split(config: DataConfig, seed: int) -> tuple[list[Problem], list[Problem], list[Problem], list[str]]:
    """Train, validation and test problems, and what to tell the user about them."""
    notes: list[str] = []
    train = _load("train", config.data_prefix.train)
    validation = _load("validation", config.data_prefix.validation)
    test = _load("test", config.data_prefix.test)
    if train is None:
        train, made_validation, made_test = generate_problems(config.synthetic, seed)
        named = {_key(p) for p in [*(validation or []), *(test or [])]}
        train = [p for p in train if _key(p) not in named]
        validation = [p for p in made_validation if _key(p) not in named] if validation is None else validation
        test = [p for p in made_test if _key(p) not in named] if test is None else test
        for name, split in (("train", train), ("validation", validation), ("test", test)):
            if not split:
                raise UserError(
                    f"model.data: every generated {name} problem is in another split's file; raise "
                    f"model.data.synthetic.num_{name} or name model.data.data_prefix.{name}"
                )
        return train, validation, test, notes
    if test is None:
        train, test, note = _hold_out(train, "test", config.synthetic.num_test, seed)
        notes.append(note)
    if validation is None:
        train, validation, note = _hold_out(train, "validation", config.synthetic.num_validation, seed)
        notes.append(note)
    return train, validation, test, notes


def _hold_out(problems: list[Problem], name: str, most: int, seed: int) -> tuple[list[Problem], list[Problem], str]:
    """What is left to train on, the held-out slice (whole questions: a repeated one is on one side only), a note."""
    questions = list(dict.fromkeys(_key(problem) for problem in problems))
    if len(questions) < MIN_TO_SPLIT:
        raise UserError(
            f"model.data.data_prefix.train has {len(questions)} different questions, at least {MIN_TO_SPLIT} are "
            f"needed to hold some out; name a file in model.data.data_prefix.{name} or give more"
        )
    rng = random.Random(f"{seed}/{name}")
    chosen = set(rng.sample(questions, max(1, min(most, len(questions) // 10))))
    held_out = {_key(problem): problem for problem in problems if _key(problem) in chosen}
    train = [problem for problem in problems if _key(problem) not in chosen]
    note = f"{name}: {len(held_out)} problems held out from the train files, {len(train)} left to train on"
    return train, list(held_out.values()), note


def _load(split: str, paths: list[str] | None) -> list[Problem] | None:
    """A split's problems, all its files one after another; None where none is named."""
    if paths is None:
        return None
    if not paths:
        raise UserError(f"model.data.data_prefix.{split} is an empty list; name a JSONL file or set it to null")
    return [problem for path in paths for problem in load_jsonl(path)]


def _key(problem: Problem) -> str:
    return " ".join(problem.question.split())


def _check_disjoint(first: str, problems: list[Problem], second: str, held_out: list[Problem]) -> None:
    sources = {_key(problem): problem.source for problem in held_out}
    shared = [problem for problem in problems if _key(problem) in sources]
    if shared:
        raise UserError(
            f"{shared[0].source}: this question of model.data.data_prefix.{first} is also in {second} "
            f"({sources[_key(shared[0])]}), {len(shared)} such in all; held-out problems must be in no other split, "
            "remove them from one of the two"
        )


def _check_template(template: str) -> None:
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(
            f"model.data.prompt_template {template!r} is malformed ({error}); double a brace that is meant as such"
        ) from None
    if fields != ["question"]:
        found = ", ".join(f"{{{name}}}" for name in fields) or "none"
        raise UserError(
            f"model.data.prompt_template {template!r} must hold {{question}} once and no other field, it holds "
            f"{found}; double a brace that is meant as such"
        )


class _Encoder:
    """Tokenises problems and holds them to the context's length."""

    def __init__(self, template: str, tokenizer: Tokenizer, context: int, max_response: int):
        self.template = template
        self.tokenizer = tokenizer
        self.context = context
        self.max_response = max_response

    def prompts(self, problems: Iterable[Problem]) -> list[EncodedProblem]:
        return [EncodedProblem(self._prompt(problem), problem.answer, problem.question) for problem in problems]

    def worked(
        self, problems: list[Problem], responses: list[str] | list[str | None], must_fit: bool
    ) -> list[EncodedProblem]:
        examples = []
        for problem, response in zip(problems, responses, strict=True):
            if response is None:
                raise UserError(
                    f"{problem.source}: no worked response, which model.data.data_prefix.sft needs; add "
                    '"response": "<think>...</think><answer>...</answer>" or reasoning before \'#### answer\''
                )
            prompt_ids = self._prompt(problem)
            sft_ids = [*self._encode(response, problem.source), self.tokenizer.eos_id]
            if len(sft_ids) <= self.max_response:
                examples.append(EncodedProblem(prompt_ids, problem.answer, problem.question, sft_ids))
            elif must_fit:
                raise UserError(
                    f"{problem.source}: the worked response has {len(sft_ids)} tokens with eos, but "
                    f"model.grpo.length_params.max_length is {self.max_response}; shorten it or raise max_length"
                )
        return examples

    def _prompt(self, problem: Problem) -> list[int]:
        ids = self._encode(self.template.format(question=problem.question), problem.source)
        if len(ids) + self.max_response > self.context:
            raise UserError(
                f"{problem.source}: the prompt has {len(ids)} tokens and the response may have {self.max_response} "
                f"(model.grpo.length_params.max_length), together more than the context of {self.context} "
                "(model.encoder_seq_length); shorten the question, lower max_length or raise encoder_seq_length"
            )
        if not ids:
            raise UserError(f"{problem.source}: the prompt has no tokens; check the question and the tokenizer")
        return ids

    def _encode(self, text: str, source: str) -> list[int]:
        try:
            return self.tokenizer.encode(text)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
