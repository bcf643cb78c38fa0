"""The same command on the project's example files, and on problems in GSM8K's format with a Hugging Face tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.tiny_run import lines, train

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples" / "data"


def test_the_example_files(tmp_path):
    splits = [f"model.data.data_prefix.{s}=[{EXAMPLES / s}.jsonl]" for s in ("train", "validation", "test")]
    train(tmp_path / "run", *splits, "model.grpo.length_params.max_length=40")
    questions = {json.loads(line)["question"] for line in (EXAMPLES / "train.jsonl").read_text().splitlines()}
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert samples
    assert {s["prompt"] for s in samples} <= questions
    (first, *_) = (v for v in lines(tmp_path / "run" / "validation.jsonl") if v["split"] == "test")
    assert first["num_problems"] == len((EXAMPLES / "test.jsonl").read_text().splitlines())


def character_tokenizer(folder: Path) -> Path:
    """A Hugging Face tokenizer folder: one token a character, and the tags."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?+-*/=$<>\n"
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[EOS]", *tags, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[EOS]", pad_token="[PAD]")
    fast.add_special_tokens({"additional_special_tokens": tags})
    fast.save_pretrained(folder)
    return folder


def test_gsm8k_format_with_a_hugging_face_tokenizer(tmp_path):
    rng = random.Random(0)
    data = tmp_path / "problems.jsonl"
    with open(data, "w") as out:
        for name in ("Ann", "Bo", "Cy", "Di"):
            for a in range(2, 12):
                b = rng.randrange(2, 9)
                question = f"{name} has {a} pens and buys {b} more. How many now?"
                answer = f"{name} has {a}+{b}=<<{a}+{b}={a + b}>>{a + b} pens.\n#### {a + b}"
                out.write(json.dumps({"question": question, "answer": answer}) + "\n")
    run = tmp_path / "run"
    train(
        run,
        f"model.data.data_prefix.train=[{data}]",
        "model.tokenizer.library=huggingface",
        f"model.tokenizer.type={character_tokenizer(tmp_path / 'tokenizer')}",
        "model.encoder_seq_length=160",
        "model.grpo.length_params.max_length=64",
        "model.data.prompt_template='{question} '",
    )
    samples = lines(run / "samples.jsonl")
    assert {s["prompt"].split()[0] for s in samples} <= {"Ann", "Bo", "Cy", "Di"}
    assert all(s["gold"].isdigit() for s in samples)
    losses = [r["loss/mean"] for r in lines(run / "cold_start.jsonl")]
    assert losses[-1] < 0.8 * losses[0]  # the reasoning in front of #### was learnt from
