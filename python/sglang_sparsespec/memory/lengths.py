"""How much more a request will put out: a running estimate from those that ended."""

from __future__ import annotations

from collections import deque

KEPT = 64  # lengths remembered of each class
ENOUGH = 8  # lengths below which a class says too little


class ExpectedLengths:
    """Output lengths of the last requests that ended, by class of prompt.

    A class is all prompts whose lengths have the same power of two below them: prompts of one kind of work
    are of a kind in length, and nothing else is known of them.
    """

    def __init__(self) -> None:
        self._classes: dict[int, deque[int]] = {}
        self._all: deque[int] = deque(maxlen=KEPT)

    def ended(self, prompt: int, output: int) -> None:
        """A request with a prompt of `prompt` tokens ended by itself after `output` tokens."""
        self._classes.setdefault(prompt.bit_length(), deque(maxlen=KEPT)).append(output)
        self._all.append(output)

    def remaining(self, prompt: int, done: int, most: int) -> int:
        """Tokens that a request is expected to put out still, at most `most`.

        The mean of what was left, at this point, to those of its class that went further. One that is longer
        than all before it is expected to go on for as long as it has gone. `most` where nothing ended yet.
        """
        seen = self._classes.get(prompt.bit_length(), self._all)
        if len(seen) < ENOUGH:
            seen = self._all
        if not seen:
            return most
        longer = [length - done for length in seen if length > done]
        return min(most, -(-sum(longer) // len(longer)) if longer else max(done, 1))
