"""Byte-level BPE tokenizers made of vocabulary files without a `tokenizer.json`: Moonshot's and Qwen's.

Such files hold the tokens alone.  Before tokens are merged, the class that reads the files splits the text by a
rule of its own.  The rules of the classes that this engine knows are repeated here.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from rollout.core.errors import StartupError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# A run of Han characters stands alone: the two kinds of words hold none.
_UPPER = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
_LOWER = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"
MOONSHOT_SPLIT = "|".join(
    (
        r"\p{Han}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
QWEN2_SPLIT = "|".join(
    (
        _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def _letters() -> tuple[str, ...]:
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return tuple(chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256))


BYTE_LETTERS = _letters()
"""The letter that stands for each byte in a byte-level vocabulary: itself if it is printable, else one from 256."""
MOONSHOT_RESERVED = 256
"""Ids behind the ranks that Moonshot's class names, whether `tokenizer_config.json` does or not."""

MAX_ADDED = 1 << 16
"""Ids behind the ranks, named or not."""


def moonshot_tokenizer(path: Path, added: dict[int, AddedToken]) -> Tokenizer:
    """Return the tokenizer of a `tiktoken.model`, as the class TikTokenTokenizer of Kimi-K2 and Moonlight reads it.

    `added` are the tokens that `tokenizer_config.json` names; other ids behind the ranks are `<|reserved_token_ID|>`.
    Raises `StartupError`.
    """
    ranks = _read_ranks(path)
    vocab = {_spelled(token): rank for token, rank in ranks.items()}
    model = models.BPE(vocab=vocab, merges=_merges(ranks), ignore_merges=True)
    tokenizer = _byte_level(model, MOONSHOT_SPLIT)
    end = max(len(ranks) + MOONSHOT_RESERVED, max(added, default=0) + 1)
    if end > len(ranks) + MAX_ADDED:
        raise StartupError(
            f"tokenizer_config.json gives a token the id {end - 1}, which is far beyond {len(ranks)} ranks"
        )
    tokenizer.add_tokens([added.get(index) or _reserved(index) for index in range(len(ranks), end)])
    return tokenizer


def _reserved(index: int) -> AddedToken:
    return AddedToken(f"<|reserved_token_{index}|>", normalized=False, special=True)


def qwen2_tokenizer(vocab_path: Path, merges_path: Path) -> Tokenizer:
    """Return the tokenizer of `vocab.json` and `merges.txt`, as the class Qwen2Tokenizer reads them.

    Raises `StartupError`.
    """
    try:
        model = models.BPE(*models.BPE.read_file(str(vocab_path), str(merges_path)))
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"{vocab_path.name} and {merges_path.name} cannot be read: {error}") from None
    tokenizer = _byte_level(model, QWEN2_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _byte_level(model: models.BPE, split: str) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token, by its bytes.  A line is a token in base64 and its rank, which is its id."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise StartupError(f"{path.name} is not a file of tiktoken ranks: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise StartupError(f"{path.name}: ranks must count up from 0 without gaps and include every single byte")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes up another token, tokens of low rank first.

    Merging these pairs is what tiktoken does.
    """
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_spelled(left), _spelled(right)) for left, right in pairs]
    return merges


def _spelled(token: bytes) -> str:
    return "".join(map(BYTE_LETTERS.__getitem__, token))
