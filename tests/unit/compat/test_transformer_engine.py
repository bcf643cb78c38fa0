"""A Transformer Engine that is there and broken is as if it were not there, and says why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('libcudart.so.12: no such file')", "OSError: libcudart.so.12: no such file"),
        ("import transformer_engine_torch", "ModuleNotFoundError: No module named 'transformer_engine_torch'"),
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no such file"),
    ],
)
def test_a_model_of_local_layers_can_be_built_all_the_same(tmp_path, body, reason):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(body)
    code = """
import nemo_sspo.model
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from nemo_sspo.model.transformer_engine import why_not
print(HAVE_TE, why_not())
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == f"False Transformer Engine can't be imported ({reason})", done.stderr
