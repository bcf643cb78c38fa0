"""What a Hugging Face folder lacks or has wrong is named before a weight is touched; exports go on where they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_sspo.checkpoint.export import export_hf
from nemo_sspo.errors import UserError
from nemo_sspo.model import Policy, build_model, hf_weights
from nemo_sspo.model.hf_weights import INDEX, SINGLE, hf_shapes, hf_tensors, load_hf_weights
from nemo_sspo.training.convert import model_of
from tests.hf_models import make_model, save_model

FAMILY = "qwen3_moe"
ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return save_model(FAMILY, tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy in two files with an index, to be spoilt."""
    tensors = load_file(original / SINGLE)
    names, path = sorted(tensors), tmp_path / "model"
    path.mkdir()
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, path / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text((original / "config.json").read_text())
    return path


@pytest.fixture
def policy(groups, original) -> Policy:
    model, precision = model_of(original, ())
    return build_model(model, 0, groups, precision)


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Any], name: str = ROUTER) -> str:
    """Rewrite the file of tensor `name`; returns the file's name."""
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"][name]
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file)
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != file} | dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps(index))
    return file


def refused(policy: Policy, folder: Path, message: str) -> None:
    """`load_hf_weights` says `message` and leaves the weights as they are."""
    before = {name: tensor.clone() for name, tensor in hf_tensors(policy)}
    with pytest.raises(UserError, match=message):
        load_hf_weights(policy, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in hf_tensors(policy))


def test_both_kinds_of_folders_load(policy, folder, original):
    expected = load_file(original / SINGLE)
    for source in (folder, original):
        for parameter in policy.chunks[0].parameters():
            parameter.data.fill_(-7.0)
        seen: list[tuple[int, int]] = []
        load_hf_weights(policy, source, lambda done, total, seen=seen: seen.append((done, total)))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in hf_tensors(policy))
        assert seen[-1][0] == seen[-1][1] == len(seen)
        assert not policy.chunks[0].embedding.word_embeddings.weight[policy.vocab_size :].any()  # padding


def test_a_missing_tensor(policy, folder):
    change(folder, lambda tensors: tensors.pop(ROUTER))
    refused(policy, folder, rf"model: {ROUTER} is missing; is it the folder of another model")


def test_an_extra_tensor(policy, folder):
    change(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}))
    refused(policy, folder, r"model.layers.1.self_attn.q_proj.bias is not in the model, and would be dropped")


def test_tensors_that_are_made_again_may_be_there(policy, folder):
    change(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load_hf_weights(policy, folder)


def test_a_misshaped_tensor(policy, folder):
    file = change(folder, lambda tensors: tensors.update({ROUTER: torch.zeros(4, 16)}))
    refused(policy, folder, rf"{file}: {ROUTER} has shape \[4, 16\], the model wants \[4, 32\]")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite(policy, folder, value, monkeypatch):
    monkeypatch.setattr(hf_weights, "_FINITE_ROWS", 3)  # the value is in the last rows that are looked at
    file = change(folder, lambda tensors: tensors[ROUTER].__setitem__((3, 31), value))
    with pytest.raises(UserError, match=rf"{file}: {ROUTER} has values that are not finite"):
        load_hf_weights(policy, folder)


def test_an_interrupted_download(policy, folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(policy, folder, r"model-00002-of-00002\.safetensors: missing, though .*index.json names it; the download")


def test_a_file_that_is_cut_short(policy, folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(policy, folder, r"model-00002-of-00002\.safetensors: can't be read as safetensors")


def test_an_index_that_names_the_wrong_file(policy, folder):
    index = json.loads((folder / INDEX).read_text())
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} - {index["weight_map"][ROUTER]}
    index["weight_map"][ROUTER] = other.pop()
    (folder / INDEX).write_text(json.dumps(index))
    refused(policy, folder, rf"lacks {ROUTER}, which .* says is there")


def test_pickled_weights_are_refused(policy, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(policy, tmp_path, r"only pickled weights \(pytorch_model\.bin\), which are refused")


def test_an_empty_folder(policy, tmp_path):
    refused(policy, tmp_path, r"no weights; give a folder with model\.safetensors")


# -- export ---------------------------------------------------------------------------------------------------------


def export(policy: Policy, target: Path, source: str = "it", shard_bytes: int = 20_000) -> None:
    export_hf(policy, target, {"model_type": "qwen3_moe"}, source, None, shard_bytes=shard_bytes)


def test_an_export_is_cut_into_files_with_an_index(policy, original, tmp_path):
    load_hf_weights(policy, original)
    export(policy, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 25_000 for file in files)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    expected = load_file(original / SINGLE)
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in expected.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], expected[name])
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
    fresh = make_model(FAMILY).state_dict()
    assert all(torch.equal(fresh[name], tensor) for name, tensor in hf_tensors(policy) if "experts" not in name)


def test_an_export_that_was_killed_goes_on(policy, tmp_path, monkeypatch):
    """Whole files are not made again, and the result is the same."""
    from nemo_sspo.checkpoint import export as module

    export(policy, tmp_path / "whole")
    write, written = module._write, []

    def dies(path: Path, tensors: dict[str, Tensor]) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, tensors)

    monkeypatch.setattr(module, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        export(policy, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(UserError, match="unfinished export of another model"):
        export(policy, tmp_path / "out", source="another")
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written}
    monkeypatch.setattr(module, "_write", write)
    export(policy, tmp_path / "out")
    assert times == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written}
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


def test_a_folder_that_holds_something_is_left_alone(policy, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty; choose another folder"):
        export(policy, tmp_path)
    export(policy, tmp_path / "out")
    with pytest.raises(UserError, match="holds a model already"):
        export(policy, tmp_path / "out")


def test_names_and_shapes_are_hugging_faces(policy, original):
    expected = {name: tuple(tensor.shape) for name, tensor in load_file(original / SINGLE).items()}
    assert hf_shapes(policy) == expected
