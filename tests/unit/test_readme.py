"""What the README says of the tests is what the tests do."""

from __future__ import annotations

from tests.distributed.layouts_table import README, replaced


def test_the_table_of_layouts_is_up_to_date():
    text = README.read_text()
    assert replaced(text) == text, "run python -m tests.distributed.layouts_table"
