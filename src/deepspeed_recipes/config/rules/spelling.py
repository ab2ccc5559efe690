"""Which key a misspelt one means, in microseconds: a file may have 60,000 unknown keys."""

import difflib
from functools import cache


def nearest(name: str, known: tuple[str, ...]) -> str | None:
    """Return the known key that `name` is a misspelling of, compared without case, `-` and `_`."""
    if name.startswith(("_", "/", "#")) or "comment" in name.lower():
        return None  # a comment, not a misspelt `comet`
    wanted = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    if len(wanted) > 100:
        return None  # over twice the longest key of all
    letters, length = _letters(wanted), len(wanted)
    # Of two names that are 80 % alike, a fifth of the letters at most is in one only. This excludes nearly all keys, a
    # hundred times faster than difflib, and none that difflib would find.
    candidates = {
        plain: key for plain, key, others, size in _plain(known) if 5 * (letters ^ others).bit_count() <= length + size
    }
    close = difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.8) if candidates else []
    return candidates[close[0]] if close else None


@cache
def _plain(known: tuple[str, ...]) -> list[tuple[str, str, int, int]]:
    """Return each key without `_`, as it is, its letters, and their number."""
    return [(plain := key.lower().replace("_", ""), key, _letters(plain), len(plain)) for key in known]


def _letters(word: str) -> int:
    """Return the characters of a word as bits: one for its first `a`, one for its second; some share bits."""
    bits = 0
    for character in word:
        bit = 1 << (ord(character) & 63)
        while bits & bit:
            bit <<= 64
        bits |= bit
    return bits
