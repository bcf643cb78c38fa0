"""JSONL files: what is understood, and each mistake with its file and line."""

from __future__ import annotations

import json

import pytest

from nemo_sspo.data import Problem, load_jsonl
from nemo_sspo.errors import UserError

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"


def load(tmp_path, text: str | bytes) -> list[Problem]:
    path = tmp_path / "data.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_jsonl(path)


def test_plain(tmp_path):
    rows = [
        {"question": "2+3=", "answer": "5"},
        {"question": "2+4=", "answer": 6, "level": "easy"},
        {"question": "1/2+2=", "answer": 2.5},
        {"question": "9+0=", "answer": 10**400},
        {"question": "2+5=", "answer": "7", "response": "<think>2+5+0=7</think><answer>7</answer>"},
        {"question": "2+6=", "answer": "8", "response": None},
    ]
    problems = load(tmp_path, "\n".join(map(json.dumps, rows)))
    assert problems == [
        Problem("2+3=", "5"),
        Problem("2+4=", "6"),
        Problem("1/2+2=", "2.5"),
        Problem("9+0=", "1" + "0" * 400),
        Problem("2+5=", "7", "<think>2+5+0=7</think><answer>7</answer>"),
        Problem("2+6=", "8"),
    ]
    assert [p.source for p in problems] == [f"{tmp_path}/data.jsonl:{i}" for i in range(1, 7)]


def test_gsm8k(tmp_path):
    rows = [
        {"question": "How many?", "answer": GSM8K},
        {"question": "And now?", "answer": "#### 1,024"},
        {"question": "Then?", "answer": "So\n####7", "response": "<think></think><answer>7</answer>"},
    ]
    first, second, third = load(tmp_path, "\n".join(map(json.dumps, rows)))
    assert first.answer == "72"
    assert first.response == (
        "<think>Natalia sold 48/2 = 24 clips in May.\nIn all 48+24 = 72.</think><answer>72</answer>"
    )
    assert second == Problem("And now?", "1,024")
    assert third == Problem("Then?", "7", "<think></think><answer>7</answer>")


def test_blank_lines_byte_order_mark_and_windows_line_ends(tmp_path):
    text = '\ufeff{"question": "é", "answer": "1"}\r\n\r\n{"question": "b", "answer": "2"}\r\n'
    problems = load(tmp_path, text)
    assert [p.question for p in problems] == ["é", "b"]
    assert problems[1].source.endswith("data.jsonl:3")


GOOD = '{"question": "2+3=", "answer": "5"}\n'
BAD_LINES = {
    "no JSON": ('{"question": "2+3=", ', "not JSON (Expecting property name"),
    "plain text": ("2+3=5", "not JSON ("),
    "two objects": (GOOD.strip() + GOOD.strip(), "not JSON (Extra data at column 36)"),
    "nested too deep": ("[" * 100_000, "not JSON ("),
    "endless number": ('{"question": "a", "answer": ' + "1" * 5000 + "}", "not JSON ("),
    "list": ('["2+3=", "5"]', "list instead of an object with question and answer"),
    "null": ("null", "NoneType instead of an object"),
    "no question": ('{"answer": "5"}', "no key 'question', only 'answer'; add it"),
    "no answer": ('{"question": "2+3=", "anwser": "5"}', "no key 'answer', only 'question', 'anwser'"),
    "no keys": ("{}", "no key 'question', only none at all"),
    "question is a number": ('{"question": 5, "answer": "5"}', "question is 5; it must be a text"),
    "question is empty": ('{"question": " ", "answer": "5"}', "question is empty"),
    "answer is a list": ('{"question": "a", "answer": ["5"]}', 'answer is ["5"]; it must be a text or a number'),
    "answer is true": ('{"question": "a", "answer": true}', "answer is true; it must be a text or a number"),
    "answer is null": ('{"question": "a", "answer": null}', "answer is null"),
    "answer is NaN": ('{"question": "a", "answer": NaN}', "answer is NaN; it must be"),
    "answer is empty": ('{"question": "a", "answer": ""}', "answer is empty"),
    "answer is prose": ('{"question": "a", "answer": "it is five"}', "the answer 'it is five' can't be verified"),
    "nothing after ####": ('{"question": "a", "answer": "so\\n#### "}', "the answer is empty"),
    "response is a number": ('{"question": "a", "answer": "5", "response": 5}', "response is 5; it must be a text"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(UserError) as error:
        load(tmp_path, GOOD + "\n" + line + "\n" + GOOD)
    assert str(error.value).startswith(f"{tmp_path}/data.jsonl:3: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_line_that_is_not_utf8(tmp_path):
    with pytest.raises(UserError, match=r"data.jsonl:2: not UTF-8 at byte 14; save the file as UTF-8"):
        load(tmp_path, GOOD.encode() + b'{"question": "\xe9", "answer": "1"}')


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file(tmp_path, text):
    with pytest.raises(UserError, match=r"data.jsonl: the data file is empty; it needs lines such as"):
        load(tmp_path, text)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.jsonl: the data file can't be read \(No such file or directory\)"):
        load_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match=r"can't be read \(Is a directory\)"):
        load_jsonl(tmp_path)
