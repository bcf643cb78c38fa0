"""Names of FP8 recipes; none of them works here."""


class DelayedScaling:
    """A name that Megatron-Core derives from."""
