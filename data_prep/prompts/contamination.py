"""Whether a prompt holds text of a benchmark: then training on it would spoil what is reported.

Two texts share a run of 13 words, whatever their case and punctuation (the rule of the GPT-3 paper, appendix
C); of a shorter benchmark text the whole must occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

WORDS = 13

_WORD = re.compile(r"\w+")


class Benchmarks:
    """The texts that no training prompt may hold."""

    def __init__(self, texts: Iterable[str]):
        self._runs: set[str] = set()
        self._short: dict[int, set[str]] = {}  # whole texts of fewer words, by their number
        for text in texts:
            words = _words(text)
            if len(words) >= WORDS:
                self._runs.update(_runs(words, WORDS))
            elif words:
                self._short.setdefault(len(words), set()).add(" ".join(words))

    def hold(self, text: str) -> bool:
        """Whether they share text with this one."""
        words = _words(text)
        if any(run in self._runs for run in _runs(words, WORDS)):
            return True
        return any(run in texts for size, texts in self._short.items() for run in _runs(words, size))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: list[str], size: int) -> Iterator[str]:
    return (" ".join(words[i : i + size]) for i in range(len(words) - size + 1))
