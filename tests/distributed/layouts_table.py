"""The README's table of tested layouts, from the tables that the tests run over.

`python -m tests.distributed.layouts_table` puts it into README.md; a test fails when it is not up to date.
"""

from __future__ import annotations

from pathlib import Path

from tests.distributed.layouts import LAYOUTS
from tests.distributed.test_checkpoint_layouts import RESHARDINGS

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- layouts: python -m tests.distributed.layouts_table -->\n", "<!-- /layouts -->"
_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
}


def table() -> str:
    """Markdown."""
    lines = [
        "| Test | Processes | " + " | ".join(_SIZES) + " | DP | Optimizer | A checkpoint of it was read by |",
        "|---|" + "---:|" * (len(_SIZES) + 2) + "---|---|",
    ]
    for name, layout in LAYOUTS.items():
        sizes = [int(layout.keys.get(key, 1)) for key in _SIZES.values()]
        data_parallel = layout.processes // (sizes[0] * sizes[1])
        optimizer = "distributed" if layout.distributed_optimizer else "Adam"
        readers = ", ".join(f"`{read}`" for written, read in RESHARDINGS if written == name)
        cells = [f"`{name}`", str(layout.processes), *map(str, sizes), str(data_parallel), optimizer, readers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def replaced(readme: str) -> str:
    """The README with the present table."""
    head, rest = readme.split(BEGIN)
    return head + BEGIN + table() + rest[rest.index(END) :]


if __name__ == "__main__":
    README.write_text(replaced(README.read_text()))
