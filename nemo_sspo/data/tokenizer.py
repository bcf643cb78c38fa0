"""Text to token ids and back: the project's small tokenizer and any Hugging Face tokenizer folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from nemo_sspo.config.schema import TokenizerConfig
from nemo_sspo.errors import UserError

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer.

    `pad_id` differs from `eos_id`: pad is never sampled and never trained on, while eos must be.
    """

    @property
    def name(self) -> str:
        """Says which tokenizer this is; the same name means the same ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, unpadded; every id is below it."""
        ...

    @property
    def pad_id(self) -> int:
        """The id that fills up a row; never sampled."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends a response."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added. UserError for text that has none."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` with the tags, without pad and eos."""
        ...


class ArithmeticTokenizer:
    """One token a character of arithmetic, one a tag: 27 ids, of which pad is 0 and eos 1."""

    tokens = ("<pad>", "<eos>", *TAGS, *"0123456789", *"+-*/=,.() \n")
    name = "arithmetic"
    vocab_size = len(tokens)
    pad_id = 0
    eos_id = 1
    _ids: ClassVar = {token: i for i, token in enumerate(tokens) if i > 1}
    _pieces = re.compile("|".join(map(re.escape, TAGS)) + "|.", re.DOTALL)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. UserError naming the first character that has none."""
        pieces = self._pieces.findall(text)
        try:
            return [self._ids[piece] for piece in pieces]
        except KeyError as error:
            position = sum(len(piece) for piece in pieces[: pieces.index(error.args[0])])
            start = max(0, position - 30)
            known = "".join(token for token in self.tokens if len(token) == 1 and token.isprintable() and token != " ")
            raise UserError(
                f"the arithmetic tokenizer has no token for {error.args[0]!r} at position {position} of "
                f"{'...' * (start > 0)}{text[start : position + 30]!r}{'...' * (position + 30 < len(text))}; it knows "
                f"{known}, space, newline and the tags {' '.join(TAGS)}; change the text, or set "
                "model.tokenizer.library=huggingface and model.tokenizer.type to a tokenizer folder"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` with the tags, without pad and eos. ValueError for an id that is no token."""
        unknown = [i for i in ids if not 0 <= i < self.vocab_size]
        if unknown:
            raise ValueError(f"token id {unknown[0]} is outside 0..{self.vocab_size - 1}")
        return "".join(self.tokens[i] for i in ids if i > 1)


class HuggingFaceTokenizer:
    """A tokenizer folder as ``save_pretrained`` writes it, read without network.

    A tokenizer without a pad token, or whose pad is its eos, is refused: pad is never sampled, so with one id for both
    a response could never end.
    """

    def __init__(self, folder: str):
        key = "model.tokenizer.type"
        if not Path(folder).is_dir():
            raise UserError(f"{key}: {folder!r} is not a folder; give one that holds tokenizer.json")
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever a broken folder makes of it
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{key}: no tokenizer could be read from {folder!r} ({reason}); give a folder that holds "
                "tokenizer.json and tokenizer_config.json, as save_pretrained writes them"
            ) from None
        pad, eos = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        if eos is None:
            raise UserError(f"{key}: the tokenizer in {folder!r} has no eos token; set eos_token in its config")
        if pad is None or pad == eos:
            state = "no pad token" if pad is None else f"the same token {self._tokenizer.eos_token!r} as pad and as eos"
            raise UserError(
                f"{key}: the tokenizer in {folder!r} has {state}, and pad is never sampled, so eos can't stand in for "
                "it; set pad_token in its tokenizer_config.json to a token of its own"
            )
        self.name = f"huggingface:{folder}"
        self.vocab_size: int = len(self._tokenizer)
        self.pad_id: int = pad
        self.eos_id: int = eos

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, no special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` with tags and other special tokens, without pad and eos."""
        kept = [int(i) for i in ids if i not in (self.pad_id, self.eos_id)]
        text = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that ``model.tokenizer`` names. UserError for an unknown library or a folder that can't serve."""
    if config.library == "arithmetic":
        if config.type is not None:
            raise UserError(
                f"model.tokenizer.type is {config.type!r}, but library=arithmetic has no types; "
                "leave it null or set model.tokenizer.library=huggingface"
            )
        return ArithmeticTokenizer()
    if config.library == "huggingface":
        if not config.type:
            raise UserError("model.tokenizer.type is not set; library=huggingface needs a tokenizer folder there")
        return HuggingFaceTokenizer(config.type)
    raise UserError(f"model.tokenizer.library is {config.library!r}; allowed: arithmetic, huggingface")
