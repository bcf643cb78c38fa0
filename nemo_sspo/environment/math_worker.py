"""The worker behind `verifier`, run by its path: ``python math_worker.py CPU_SECONDS``.

Reads ``[gold, answer or null]`` as JSON, one a line; writes ``true`` or ``false``, one a line, after a first line
``ready``. Imports nothing of the package, so that it starts fast.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 << 30


def main() -> None:
    """Answer until the input ends."""
    sys.path.pop(0)  # this file's folder
    cpu_seconds = float(sys.argv[1])
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        return
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    no_limit: Any = None  # math_verify's own time limits are off; `parse` declares its limit as an int only

    def read(text: str) -> list:
        # Without the fallback, text that can't be read gives an empty list.
        return parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=no_limit)

    def decide(gold: str, answer: str | None) -> bool:
        wanted = read(gold)
        if answer is None or not wanted:
            return bool(wanted)
        return verify(wanted, read(answer), timeout_seconds=no_limit)

    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF has no handler: at the limit the process ends
        try:
            reply = decide(*json.loads(line))
        except (Exception, RecursionError, MemoryError):
            reply = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print("true" if reply else "false", flush=True)


if __name__ == "__main__":
    main()
