"""`train --dry-run` and `plan`: answers without a GPU, without the model's folder and without PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nemo_sspo.cli import main


def test_dry_run_of_qwen3(capsys):
    assert main(["train", "--config-name", "qwen3_30b_a3b_sspo", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "30,532,122,624 parameters, 32 processes: TP2 EP8 ETP1 PP4" in printed
    assert "fits: H100 yes" in printed


@pytest.mark.parametrize(
    ("overrides", "attention"),
    [([], "flash"), (["model.transformer_engine=false"], "local"), (["trainer.precision=32"], "local")],
)
def test_attention_is_that_of_the_layers(capsys, overrides, attention):
    """Transformer Engine's keeps no scores, in bfloat16."""
    assert main(["train", "--config-name", "qwen3_30b_a3b_sspo", "--dry-run", *overrides]) == 0
    assert f"{attention} attention:" in capsys.readouterr().out


def test_dry_run_checks_the_config(capsys):
    overrides = ["model.expert_model_parallel_size=3"]
    assert main(["train", "--config-name", "qwen3_30b_a3b_sspo", "--dry-run", *overrides]) == 2
    assert "model.expert_model_parallel_size: got 3" in capsys.readouterr().err


def test_dry_run_of_a_run_on_a_cpu(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--config-name", "tiny_moe_cpu", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "2 processes: TP1 EP1" in printed
    assert "fits" not in printed


def test_plan_takes_overrides_after_options(capsys):
    arguments = ["plan", "--config-name", "qwen3_8b", "--gpus", "8", "--top", "3", "model.encoder_seq_length=8192"]
    assert main(arguments) == 0
    assert "up to 8,192 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["plan --config-name qwen3_8b --gpus 8", "train --config-name tiny_moe_cpu --dry-run"]
)
def test_pytorch_is_not_imported(command):
    code = f"import sys; from nemo_sspo.cli import main; main({command.split()!r}); sys.exit('torch' in sys.modules)"
    if command.startswith("train"):  # the objective's options are checked by the objective
        code = code.replace("sys.exit('torch' in sys.modules)", "sys.exit('megatron' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
