"""Names of fusible operations, which Megatron-Core mentions and does not use here."""


class FusibleOperation:
    """A name in an annotation."""


class Sequential:
    """A name in an annotation."""
