"""Which layers a model gets, and what is said where Transformer Engine's can't be had."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from nemo_sspo.errors import UserError
from nemo_sspo.model import transformer_config, transformer_engine
from tests.tiny import tiny_config


@pytest.fixture
def engine(monkeypatch):
    """Pretends that Transformer Engine is installed; its version is settable."""
    module = ModuleType("transformer_engine")
    module.__version__ = "2.9.0"
    monkeypatch.setitem(sys.modules, "transformer_engine", module)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", ModuleType("transformer_engine.pytorch"))
    return module


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_without_a_gpu_the_layers_are_megatron_cores(engine):
    assert transformer_engine.chosen(None) is False


def test_on_a_gpu_they_are_transformer_engines_where_it_is_installed(engine, gpu):
    assert transformer_engine.chosen(None) is True
    assert transformer_engine.chosen(False) is False


def test_on_a_gpu_without_it_they_are_megatron_cores(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # Python's mark of what can't be imported
    assert transformer_engine.chosen(None) is False


def test_wanted_but_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UserError, match=r"model\.transformer_engine: got true, but .* can't be imported .*install"):
        transformer_config(tiny_config("model.transformer_engine=true", "trainer.accelerator=gpu").model)


def test_wanted_but_too_old(engine):
    engine.__version__ = "1.13.0+abc"
    with pytest.raises(UserError, match=r"got true, but Transformer Engine is 1\.13\.0\+abc; install .*>=2\.0 "):
        transformer_engine.chosen(True)


@pytest.mark.parametrize(
    ("wanted", "layers", "grouped"), [("true", "transformer_engine", True), ("false", "local", False)]
)
def test_configuration_says_which(engine, wanted, layers, grouped):
    config = transformer_config(tiny_config(f"model.transformer_engine={wanted}", "trainer.accelerator=gpu").model)
    assert (config.transformer_impl, config.moe_grouped_gemm) == (layers, grouped)
