"""`nemo-sspo convert` and training from pretrained weights, as a user runs them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hf_models import save_model
from tests.tiny_run import command, environment, lines, start, without_times

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
LAYOUT = ("tensor_model_parallel_size=2", "sequence_parallel=true", "expert_model_parallel_size=2")


def convert(*arguments: str, processes: int = 1, status: int = 0) -> str:
    """`nemo-sspo convert ARGUMENTS`; its standard error."""
    result = subprocess.run(
        command("convert", *arguments, processes=processes), env=environment(), capture_output=True, text=True
    )
    assert (result.returncode == 0) == (status == 0), result.stderr
    return result.stderr


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(mine: Path, theirs: Path) -> bool:
    a, b = tensors(mine), tensors(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_there_and_back_under_other_layouts(tmp_path):
    """By one process and by two, tensor- and expert-parallel; bit for bit, tokenizer and configs along."""
    source = save_model("qwen3_moe", tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    keys = [f"model.{key}" for key in LAYOUT]
    convert("hf-to-megatron", str(source), str(tmp_path / "megatron"), *keys, processes=2)
    convert("megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "one"))
    convert("megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "two"), *keys, processes=2)
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert same(folder, source)
        assert json.loads((folder / "config.json").read_text()) == json.loads((source / "config.json").read_text())
        assert (folder / "tokenizer.json").read_text() == "{}"
    assert "holds a model already" in convert(
        "megatron-to-hf", str(tmp_path / "megatron"), str(tmp_path / "one"), status=2
    )


def test_a_wrong_layout_is_refused_and_nothing_is_written(tmp_path):
    source = save_model("qwen3", tmp_path / "hf")
    arguments = ("hf-to-megatron", str(source), str(tmp_path / "out"))
    assert "takes the keys of the layout only" in convert(*arguments, "model.num_layers=3", status=2)
    assert "model.pipeline_model_parallel_size: got 3" in convert(
        *arguments, "pipeline_model_parallel_size=3", status=2
    )
    (source / "model.safetensors").write_bytes(b"nothing")
    assert "can't be read as safetensors" in convert(*arguments, status=2)
    assert not (tmp_path / "out").exists()


def test_training_starts_from_pretrained_weights(tmp_path):
    """A Hugging Face folder and a converted one give the same run; its checkpoint goes back to Hugging Face."""
    sizes = {"num_hidden_layers": 2, "head_dim": 8, "rope_theta": 10_000.0}  # of the smallest test model
    source = save_model("qwen3_moe", tmp_path / "hf", **sizes)
    convert("hf-to-megatron", str(source), str(tmp_path / "megatron"))
    runs = {}
    for name in ("hf", "megatron"):
        pretrained = f"pretrained_checkpoint.restore_from_path={tmp_path / name}"
        # Random responses earn nothing; the entropy bonus has a gradient all the same.
        options = ("trainer.sft.max_steps=0", "trainer.grpo.max_steps=1", "model.grpo.objective.entropy_coeff=0.1")
        process = start(tmp_path / f"run_{name}", pretrained, *options)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        runs[name] = without_times(lines(tmp_path / f"run_{name}" / "metrics.jsonl"))
    assert runs["hf"] == runs["megatron"]
    run = tmp_path / "run_hf"
    convert("megatron-to-hf", str(run / "checkpoints" / "step_000000"), str(tmp_path / "start"))
    assert same(tmp_path / "start", source)
    convert("megatron-to-hf", str(run), str(tmp_path / "end"))
    assert not same(tmp_path / "end", source)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    assert sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in tensors(source).values())
