"""The command's table, its options and what it refuses."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from nemo_sspo.data.tokenizer import ArithmeticTokenizer
from nemo_sspo.errors import UserError
from nemo_sspo.plan.command import add_arguments, run
from nemo_sspo.plan.job import ARITHMETIC_VOCABULARY


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_intermixed_args(arguments))


def test_table_and_sums(capsys):
    assert call("--config-name", "qwen3_30b_a3b", "--gpus", "16", "--top", "3", "--explain") == 0
    out = capsys.readouterr().out
    heading, table = out.split("GiB on the fullest GPU:\n")
    assert "30,532,122,624 parameters on 16 H100 of 80 GiB" in heading
    header, *rows = table.split("\n\n")[0].splitlines()
    for column in "TP EP PP CP DP micro recompute FP8 offload weights grads optim activ logits routes KV gen.w".split():
        assert column in header.split()
    assert len(rows) == 3 and all(len(row.split()) == len(header.split()) for row in rows)
    assert "assumed: 50% of the peak rate" in out
    assert "= training" in out and "= step" in out


def test_options_choose_layouts(capsys):
    one = "--tp 4 --ep 8 --pp 2 --micro-batch 1 --recompute full --offload on".split()
    assert call("--config-name", "qwen3_30b_a3b", "--gpus", "16", *one) == 0
    out = capsys.readouterr().out
    assert "1 layouts, 1 fit" in out
    assert out.splitlines()[4].split()[:9] == ["4", "8", "2", "1", "2", "1", "full", "no", "yes"]


def test_fp8_and_an_engine(capsys):
    options = ["--gpu", "b200", "--fp8", "--generation-tp", "2", "--top", "500"]
    assert call("--config-name", "qwen3_8b", "--gpus", "8", *options, "model.encoder_seq_length=16384") == 0
    out = capsys.readouterr().out
    assert "8 B200 of 179 GiB" in out and "up to 16,384 tokens" in out and "over 2 GPUs" in out
    assert {line.split()[7] for line in out.splitlines()[4:] if line.startswith(" ") and "yes" in line} == {"yes", "no"}


def test_a_runs_config(capsys):
    assert call("--config-name", "tiny_moe_cpu", "--gpus", "2", "--attention", "local") == 0
    assert "precision 32, adam, local attention" in capsys.readouterr().out
    assert ArithmeticTokenizer().vocab_size == ARITHMETIC_VOCABULARY


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--gpus", "0", "a whole number >= 1"),
        ("--gpus", "many", "a whole number >= 1"),
        ("--gpu-memory", "-1", "a number > 0"),
        ("--gpu-memory", "nan", "a number > 0"),
        ("--top", "0", "a whole number >= 1"),
    ],
)
def test_refuses_a_number_with_what_is_allowed(capsys, option, value, allowed):
    with pytest.raises(SystemExit):
        call("--config-name", "qwen3_8b", "--gpus", "8", option, value)
    assert f"argument {option}: got '{value}', allowed: {allowed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "qwen3_8b --gpus 7",
            r"--gpus: got 7, allowed: .*step=64 and .*size=512; the nearest possible are 6 and 8",
        ),
        ("qwen3_8b --gpus 8 --tp 3", r"--tp=3: no such layout of 8 GPUs .* tp 1, 2, 4, 8"),
        ("qwen3_8b --gpus 8 --generation-tp 3", r"--generation-tp: got 3, allowed: a divisor of --gpus=8 and of .*=32"),
        ("nothing --gpus 8", r"no config named 'nothing'.*tiny_moe_cpu.*models: qwen2_5_7b, qwen3_14b, qwen3_30b_a3b"),
        ("qwen3_8b --gpus 8 model.hiden_size=8", r"there is no key model.hiden_size"),
        ("qwen3_8b --gpus 8 model.num_layers=0", r"model.num_layers: got 0, allowed: >= 1"),
        ("qwen3_8b --gpus 8 model.num_query_groups=5", r"model.num_query_groups: got 5, allowed: a divisor of .*=32"),
        ("tiny_moe_cpu --gpus 2 --fp8", r"--fp8: needs trainer.precision=bf16, got 32"),
        (
            "tiny_moe_cpu --gpus 2 model.tokenizer.library=huggingface model.tokenizer.type=somewhere",
            r"--vocab-size: not given, allowed: the number of ids of the tokenizer in somewhere",
        ),
    ],
)
def test_refuses_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        call("--config-name", *arguments.split())
    assert "\n" not in str(caught.value)


def test_answers_without_torch():
    code = "import sys, nemo_sspo.plan.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
