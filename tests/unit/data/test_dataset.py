"""The splits of a run: where they come from, what they hold, what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_sspo.config.schema import DataConfig, DataPrefixConfig, SyntheticDataConfig
from nemo_sspo.data import ArithmeticTokenizer, Datasets, build_datasets, generate_problems
from nemo_sspo.data.arithmetic import spoil_responses
from nemo_sspo.errors import UserError

TOKENIZER = ArithmeticTokenizer()
EXAMPLES = Path(__file__).parents[3] / "examples" / "data"
SYNTHETIC = SyntheticDataConfig(num_train=30, num_validation=6, num_test=7)


def build(seed: int = 1, context: int = 64, response: int = 48, **options) -> Datasets:
    prefix = {key: options.pop(key) for key in ("train", "validation", "test", "sft") if key in options}
    named = DataPrefixConfig(**{key: [str(path) for path in paths] for key, paths in prefix.items()})
    config = DataConfig(data_prefix=named, **{"synthetic": SYNTHETIC, **options})
    return build_datasets(config, TOKENIZER, seed, context, response)


@pytest.fixture
def write(tmp_path):
    """Writes rows of (question, answer) or (question, answer, response) and gives the file's path."""

    def write(name: str, *rows: tuple) -> Path:
        path = tmp_path / f"{name}.jsonl"
        lines = [json.dumps(dict(zip(("question", "answer", "response"), row, strict=False))) for row in rows]
        path.write_text("\n".join(lines))
        return path

    return write


def sums(start: int, stop: int, worked: bool = True) -> list[tuple]:
    rows = [(f"{i}+1=", str(i + 1), f"<think>{i}+1+0={i + 1}</think><answer>{i + 1}</answer>") for i in range(9 + stop)]
    return [row if worked else row[:2] for row in rows[start:stop]]


def questions(split) -> set[str]:
    return {p.question for p in split}


def test_generated():
    data = build()
    train, validation, test = generate_problems(SYNTHETIC, 1)
    for split, problems in ((data.train, train), (data.validation, validation), (data.test, test)):
        assert [(p.question, p.gold, TOKENIZER.decode(p.prompt_ids), p.sft_ids) for p in split] == [
            (p.question, p.answer, p.question, None) for p in problems
        ]
    assert [p.question for p in data.sft] == [p.question for p in train]
    assert [TOKENIZER.decode(p.sft_ids or []) for p in data.sft] == spoil_responses(train, SYNTHETIC, 1)
    assert all(p.sft_ids is not None and p.sft_ids[-1] == TOKENIZER.eos_id for p in data.sft)
    assert data.notes == ()
    assert build() == data
    assert build(seed=2) != data


def test_the_examples():
    names = {split: [EXAMPLES / f"{split}.jsonl"] for split in ("train", "validation", "test")}
    data = build(**names)
    assert (len(data.train), len(data.validation), len(data.test), len(data.sft)) == (400, 64, 64, 400)
    first = json.loads((EXAMPLES / "train.jsonl").read_text().splitlines()[0])
    assert TOKENIZER.decode(data.sft[0].sft_ids or []) == first["response"]  # a user's own responses are left alone


def test_prompt_template(write):
    data = build(prompt_template="({question}) ", test=[write("test", ("2+3=", "5"))])
    assert TOKENIZER.decode(data.test[0].prompt_ids) == "(2+3=) "
    assert data.test[0].question == "2+3="


def test_several_files_of_one_split_follow_each_other(write):
    data = build(test=[write("a", ("2+3=", "5")), write("b", ("2+4=", "6"), ("2+5=", "7"))])
    assert [p.gold for p in data.test] == ["5", "6", "7"]


def test_held_out_from_train(write):
    data = build(train=[write("train", *sums(0, 40))])
    assert (len(data.train), len(data.validation), len(data.test), len(data.sft)) == (33, 3, 4, 33)
    assert questions(data.train) | questions(data.validation) | questions(data.test) == {q for q, *_ in sums(0, 40)}
    assert questions(data.sft) == questions(data.train)
    assert data.notes == (
        "test: 4 problems held out from the train files, 36 left to train on",
        "validation: 3 problems held out from the train files, 33 left to train on",
    )
    assert build(train=[write("train", *sums(0, 40))]) == data
    assert questions(build(train=[write("train", *sums(0, 40))], seed=2).test) != questions(data.test)


def test_held_out_no_more_than_asked_for(write):
    data = build(train=[write("train", *sums(0, 300))])
    assert (len(data.train), len(data.validation), len(data.test)) == (287, 6, 7)


def test_only_the_split_that_is_not_named_is_held_out(write):
    data = build(train=[write("train", *sums(0, 20))], test=[write("test", *sums(50, 53))])
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 3)


def test_a_repeated_question_is_on_one_side_only(write):
    data = build(train=[write("train", *sums(0, 20), *sums(0, 20))])
    assert (len(data.train), len(data.validation), len(data.test)) == (34, 1, 2)
    assert not questions(data.train) & (questions(data.validation) | questions(data.test))


def test_too_few_to_hold_out(write):
    train = write("train", *sums(0, 9), *sums(0, 9))
    with pytest.raises(UserError, match=r"train has 9 different questions, at least 10 are needed to hold some out"):
        build(train=[train])
    named = {"validation": [write("validation", *sums(20, 21))], "test": [write("test", *sums(21, 22))]}
    assert len(build(train=[train], **named).train) == 18


def test_cold_start_only_from_problems_with_worked_responses(write):
    data = build(train=[write("train", *sums(0, 20), *sums(20, 40, worked=False))])
    assert 0 < len(data.sft) <= 20
    assert questions(data.sft) <= {q for q, *_ in sums(0, 20)}
    assert build(train=[write("train", *sums(0, 20, worked=False))]).sft == []


def test_cold_start_file(write):
    data = build(sft=[write("sft", *sums(0, 4))])
    assert [TOKENIZER.decode(p.sft_ids or []) for p in data.sft] == [row[2] for row in sums(0, 4)]
    with pytest.raises(UserError, match=r"sft.jsonl:5: no worked response, which model.data.data_prefix.sft needs"):
        build(sft=[write("sft", *sums(0, 4), *sums(4, 6, worked=False))])


def test_worked_responses_that_are_too_long(write):
    long = ("2+3=", "5", "<think>" + "1" * 40 + "</think><answer>5</answer>")  # 46 tokens with eos
    train = write("train", *sums(0, 20), long)
    fits = build(train=[train], response=46, seed=3)
    cut = build(train=[train], response=45, seed=3)
    assert questions(fits.sft) - questions(cut.sft) == {"2+3="}
    assert "2+3=" in questions(cut.train)
    assert cut.notes[-1].startswith("1 of 18 worked responses are longer than model.grpo.length_params.max_length (45)")
    with pytest.raises(UserError, match=r"sft.jsonl:1: the worked response has 46 tokens with eos, but .* is 45"):
        build(sft=[write("sft", long)], response=45)


def test_a_prompt_that_does_not_fit_the_context(write):
    test = write("test", ("2+3=", "5"), ("1+1+1+1+1=", "5"))  # 10 tokens
    assert build(test=[test], context=58).test
    with pytest.raises(UserError) as error:
        build(test=[test], context=57)
    assert str(error.value) == (
        f"{test}:2: the prompt has 10 tokens and the response may have 48 (model.grpo.length_params.max_length), "
        "together more than the context of 57 (model.encoder_seq_length); shorten the question, lower max_length "
        "or raise encoder_seq_length"
    )
    with pytest.raises(UserError, match=r"generated problem '\d+\+\d+=': the prompt has \d tokens"):
        build(context=50)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("2+x=", "5"), r"test.jsonl:1: the arithmetic tokenizer has no token for 'x' at position 2 of '2\+x='"),
    ],
)
def test_a_character_that_the_tokenizer_lacks(write, row, message):
    with pytest.raises(UserError, match=message):
        build(test=[write("test", row)])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Solve:", "must hold {question} once and no other field, it holds none"),
        ("{problem}", "it holds {problem}"),
        ("{question} {question}", "it holds {question}, {question}"),
        ("{question} {}", "it holds {question}, {}"),
        ("{question.x}", "it holds {question.x}"),
        ("{question", "is malformed ("),
        ("{question} }", "is malformed ("),
        ("{{question}}", "it holds none"),
    ],
)
def test_bad_templates(template, message):
    with pytest.raises(UserError) as error:
        build(prompt_template=template)
    assert str(error.value).startswith(f"model.data.prompt_template {template!r} ")
    assert message in str(error.value)


LEAKS = [("train", "validation"), ("train", "test"), ("sft", "validation"), ("sft", "test"), ("validation", "test")]


@pytest.mark.parametrize(("first", "second"), LEAKS)
def test_leaks(write, first, second):
    starts = {"train": 0, "validation": 100, "test": 200, "sft": 300}
    rows = {name: sums(start, start + 3) for name, start in starts.items()}
    assert build(**{name: [write(name, *rows[name])] for name in rows})
    question, *rest = rows[second][1]
    rows[first] += [(f" {question.replace('+', ' +')}", *rest), (f"{question} ", *rest)]  # white space hides nothing
    rows[second].append((f"{question.replace('+', ' +')}", *rest))
    with pytest.raises(UserError) as error:
        build(**{name: [write(name, *rows[name])] for name in rows})
    for part in (f"{first}.jsonl:4: ", f"model.data.data_prefix.{first} is also in {second} (", "2 such in all"):
        assert part in str(error.value)
    assert f"{second}.jsonl:4)" in str(error.value)


def test_train_and_sft_may_share_problems(write):
    rows = sums(0, 20)
    named = {"validation": [write("validation", *sums(50, 51))], "test": [write("test", *sums(51, 52))]}
    assert len(build(train=[write("train", *rows)], sft=[write("sft", *rows)], **named).sft) == 20


def test_generated_train_problems_that_are_in_a_named_test_file_are_dropped(write):
    train, validation, _ = generate_problems(SYNTHETIC, 1)
    test = write("test", *[(p.question, p.answer) for p in (*train[:4], *validation[:2])])
    data = build(test=[test])
    assert (len(data.train), len(data.validation), len(data.test), len(data.sft)) == (26, 4, 6, 26)
    with pytest.raises(UserError, match="every generated validation problem is in another split's file"):
        build(test=[write("test", *[(p.question, p.answer) for p in validation])])


def test_an_empty_list_of_files():
    with pytest.raises(UserError, match=r"model.data.data_prefix.test is an empty list; name a JSONL file"):
        build(test=[])
