"""All randomness of a run is drawn from its seed and what it is for: nothing random has to be saved or synchronised."""

from __future__ import annotations

import random


def sample_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts (run seed, step, row, ...): the same on every rank and machine."""
    return random.Random("/".join(map(str, parts))).getrandbits(63)
