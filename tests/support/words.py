"""A tokenizer for the toys."""

from typing import Any

import tokenizers
import transformers

from .toys import VOCAB


def tokenizer() -> Any:
    """One of as many words as the toys have tokens: aa, ab, ac, ..."""
    letters = "abcdefgh"
    words = [one + two for one in letters for two in letters][:VOCAB]
    vocab = {word: place for place, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="aa"))
    pairs = tokenizers.Regex("..")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(pairs, "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="aa")
