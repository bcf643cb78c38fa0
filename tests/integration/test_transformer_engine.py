"""The builder's Transformer Engine layers: Megatron-Core's own wrappers of them, on a stand-in for the kernels.

Megatron-Core looks for Transformer Engine when it is imported, so a second pytest runs the functions ``check_*`` of the
folder `transformer_engine_cpu` with the stand-in in front of everything else. By hand:
``PYTHONPATH=tests/integration/transformer_engine_cpu .venv/bin/python -m pytest -o python_files='check_*.py' -o
python_functions='check_*' tests/integration/transformer_engine_cpu``.
"""

from __future__ import annotations

import pytest

from tests.integration.second_pytest import run_checks


@pytest.mark.slow
def test_every_check_passes_with_the_stand_in(repository):
    folder = repository / "tests" / "integration" / "transformer_engine_cpu"
    run_checks(repository, folder, in_front=folder, limit=900)
