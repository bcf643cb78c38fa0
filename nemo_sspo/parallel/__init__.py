"""What tensor, data and context parallelism ask of the maths; process groups are arguments, None is a group of one."""

from nemo_sspo.parallel.logprobs import IGNORE_INDEX, linear_logprobs, vocab_parallel_logprobs

__all__ = ["IGNORE_INDEX", "linear_logprobs", "vocab_parallel_logprobs"]
