"""Both tokenizers by value, and every way to ask for one that can't serve."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from nemo_sspo.config.schema import TokenizerConfig
from nemo_sspo.data import TAGS, ArithmeticTokenizer, HuggingFaceTokenizer, build_tokenizer
from nemo_sspo.errors import UserError

ARITHMETIC = ArithmeticTokenizer()


def test_arithmetic_by_value():
    assert (ARITHMETIC.vocab_size, ARITHMETIC.pad_id, ARITHMETIC.eos_id) == (27, 0, 1)
    assert len(set(ARITHMETIC.tokens)) == 27
    # <pad> <eos> <think> </think> <answer> </answer> 0..9 then + -
    assert ARITHMETIC.encode("<think>3+9</think><answer>-1</answer>") == [2, 9, 16, 15, 3, 4, 17, 7, 5]
    assert ARITHMETIC.decode([2, 9, 16, 15, 3, 4, 17, 7, 5, 1, 0, 0]) == "<think>3+9</think><answer>-1</answer>"
    assert ARITHMETIC.encode("") == []


@settings(deadline=None)
@given(st.lists(st.sampled_from([*TAGS, *"0123456789+-*/=,.() \n"])).map("".join))
def test_arithmetic_round_trip(text):
    ids = ARITHMETIC.encode(text)
    assert ARITHMETIC.decode([*ids, ARITHMETIC.eos_id, ARITHMETIC.pad_id]) == text
    assert all(1 < i < ARITHMETIC.vocab_size for i in ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, 26)))
def test_arithmetic_decodes_any_ids_and_drops_pad_and_eos(ids):
    assert ARITHMETIC.encode(ARITHMETIC.decode(ids)) == [i for i in ids if i > 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2+x=", "no token for 'x' at position 2 of '2+x='"),
        ("<think>2</think>a", "no token for 'a' at position 16 of "),
        ("<pad>", "no token for '<' at position 0 of '<pad>'"),
        ("1" * 100 + "é" + "2" * 100, "no token for 'é' at position 100 of ...'" + "1" * 30 + "é" + "2" * 29 + "'..."),
    ],
)
def test_a_character_that_the_arithmetic_tokenizer_lacks(text, message):
    with pytest.raises(UserError) as error:
        ARITHMETIC.encode(text)
    assert message in str(error.value)
    assert "it knows 0123456789+-*/=,.(), space, newline and the tags <think>" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [27, -1])
def test_an_id_that_is_no_token(bad):
    with pytest.raises(ValueError, match=f"token id {bad} is outside 0..26"):
        ARITHMETIC.decode([5, bad])


def save_tokenizer(folder, **special):
    """A Hugging Face tokenizer folder of single characters and the tags."""
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", *TAGS, *"abc0123456789+= "]
    core = FastTokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, additional_special_tokens=list(TAGS), **special)
    tokenizer.save_pretrained(folder)
    return folder


def test_hugging_face(tmp_path):
    folder = save_tokenizer(tmp_path, pad_token="<pad>", eos_token="<eos>")
    tokenizer = build_tokenizer(TokenizerConfig(library="huggingface", type=str(folder)))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (22, 0, 1)
    assert tokenizer.name == f"huggingface:{folder}"
    ids = tokenizer.encode("<think>a</think><answer>1</answer>")
    assert ids == [2, 6, 3, 4, 10, 5]
    decoded = tokenizer.decode([*ids, 1, 0, 0])
    assert decoded.replace(" ", "") == "<think>a</think><answer>1</answer>"
    assert "<eos>" not in decoded
    assert "<pad>" not in decoded


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ({"pad_token": "<pad>"}, "has no eos token; set eos_token"),
        ({"eos_token": "<eos>"}, "has no pad token, and pad is never sampled"),
        ({"eos_token": "<eos>", "pad_token": "<eos>"}, "has the same token '<eos>' as pad and as eos"),
    ],
)
def test_hugging_face_without_eos_or_pad(tmp_path, special, message):
    with pytest.raises(UserError) as error:
        HuggingFaceTokenizer(str(save_tokenizer(tmp_path, **special)))
    assert message in str(error.value)
    assert str(error.value).startswith("model.tokenizer.type: the tokenizer in ")


def test_hugging_face_folder_that_is_missing_empty_or_broken(tmp_path):
    with pytest.raises(UserError, match=r"model.tokenizer.type: '.*nowhere' is not a folder"):
        HuggingFaceTokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "broken" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    for name in ("empty", "broken"):
        with pytest.raises(UserError, match="no tokenizer could be read from") as error:
            HuggingFaceTokenizer(str(tmp_path / name))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TokenizerConfig(library="sentencepiece"), "library is 'sentencepiece'; allowed: arithmetic, huggingface"),
        (TokenizerConfig(library="huggingface"), "model.tokenizer.type is not set"),
        (TokenizerConfig(library="arithmetic", type="x"), "model.tokenizer.type is 'x', but library=arithmetic"),
    ],
)
def test_build_tokenizer_refuses(config, message):
    with pytest.raises(UserError) as error:
        build_tokenizer(config)
    assert message in str(error.value)


def test_build_tokenizer_default():
    assert build_tokenizer(TokenizerConfig()).name == "arithmetic"
