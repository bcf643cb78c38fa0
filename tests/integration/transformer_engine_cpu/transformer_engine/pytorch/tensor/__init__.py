"""The class of quantized tensors; there are none."""


class QuantizedTensor:
    """A name that Megatron-Core asks about."""
