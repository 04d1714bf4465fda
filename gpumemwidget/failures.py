"""Put an exception into one line, and tell each failure once."""

from __future__ import annotations


def read_first_line(exc: BaseException) -> str:
    """Return the first line of an exception's message; PyTorch's go on with a stack of C++."""
    return str(exc).strip().partition("\n")[0]


def describe_exception(exc: BaseException) -> str:
    """Return an exception as ``"ValueError: first line"``; its type alone where it has no text."""
    line = read_first_line(exc)
    return f"{type(exc).__name__}: {line}" if line else type(exc).__name__


class Notes:
    """Sentences that are told once each, however often what they tell of happens.

    Any thread may add and take them.

    Args:
        max_sentences: further sentences are dropped; the words of a failure may differ each time,
            as with an address in them.
    """

    def __init__(self, *, max_sentences: int = 100) -> None:
        self._max_sentences = max_sentences
        self._is_told: dict[str, bool] = {}

    def add(self, sentence: str) -> bool:
        """Keep a sentence, and return whether it is new."""
        if sentence in self._is_told or len(self._is_told) >= self._max_sentences:
            return False
        self._is_told[sentence] = False
        return True

    def take(self) -> tuple[str, ...]:
        """Return the sentences that were added since the last call."""
        sentences = tuple(each for each, is_told in self._is_told.copy().items() if not is_told)
        self._is_told.update(dict.fromkeys(sentences, True))
        return sentences
