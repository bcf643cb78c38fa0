"""Routing replay with the real Megatron-Core 0.11, the version of NeMo 2.2, whose routers have no place for it.

That wheel lies in a folder of its own, so a second pytest runs the functions ``check_*`` of the folder `megatron_011`
with the wheel in front of everything else. By hand:
``PYTHONPATH=.venv/megatron_core_0.11 .venv/bin/python -m pytest -o python_files='check_*.py' -o
python_functions='check_*' tests/integration/megatron_011``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.second_pytest import run_checks

WHEEL = Path(sys.prefix) / "megatron_core_0.11"
CHECKS = Path(__file__).with_name("megatron_011")


def test_every_check_passes_with_megatron_core_0_11(repository):
    if not (WHEEL / "megatron" / "core").is_dir():
        pytest.skip(f"needs Megatron-Core 0.11 in {WHEEL}: make setup puts it there")
    run_checks(repository, CHECKS, in_front=WHEEL, limit=300)
