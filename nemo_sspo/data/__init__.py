"""Problems, tokenizers, splits and batches."""

from nemo_sspo.data.arithmetic import TASKS, generate_problems
from nemo_sspo.data.batches import pad_sequences, prompt_indices, sequence_batch, supervised_batch
from nemo_sspo.data.dataset import Datasets, EncodedProblem, build_datasets
from nemo_sspo.data.jsonl import load_jsonl
from nemo_sspo.data.problem import Problem
from nemo_sspo.data.responses import ResponseBatch
from nemo_sspo.data.tokenizer import TAGS, ArithmeticTokenizer, HuggingFaceTokenizer, Tokenizer, build_tokenizer

__all__ = [
    "TAGS",
    "TASKS",
    "ArithmeticTokenizer",
    "Datasets",
    "EncodedProblem",
    "HuggingFaceTokenizer",
    "Problem",
    "ResponseBatch",
    "Tokenizer",
    "build_datasets",
    "build_tokenizer",
    "generate_problems",
    "load_jsonl",
    "pad_sequences",
    "prompt_indices",
    "sequence_batch",
    "supervised_batch",
]
