"""Names of FP8's state; FP8 is always off."""

from contextlib import nullcontext


class FP8GlobalStateManager:
    """Says that FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether layers run in FP8."""
        return False


def fp8_autocast(*_args: object, **_options: object) -> nullcontext:
    """Changes nothing."""
    return nullcontext()
