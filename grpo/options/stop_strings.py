"""STOP_STRINGS: finds the strings that end a completion in the decoded text of its ids.

A completion ends with the first id after which its text contains one of the strings. That id stays,
with any text that it adds after the string. We check only ids that can end a string, and decode
only as many ids before them as the longest string can take.
"""

from functools import cache

BEFORE = 4  # ids before a string: decoding drops the first one's space, or splits a character


class StopStrings:
    def __init__(self, tokenizer, strings):
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        # An id stands for one byte at least, as some tokenizers have ids for single bytes
        self.tail = BEFORE + max(len(string.encode()) for string in strings)
        self.may_end = cache(self._may_end)

    def _may_end(self, id):
        """Returns whether the id may end a string: its text contains a string's last character, or
        U+FFFD, which stands for part of a character. Decoding may lose a single space."""
        text = self.text([id])
        return "\ufffd" in text or any(s[-1] in text or s[-1] == " " for s in self.strings)

    def ended(self, ids, active):
        """Returns the rows of ids (S, any) that are `active` (S,) and whose last id completes a
        string."""
        rows = [i for i, id in enumerate(ids[:, -1].tolist()) if self.may_end(id)]
        if not rows:
            return []
        tails = active[rows].tolist(), ids[rows, -self.tail :].tolist()
        return [i for i, runs, own in zip(rows, *tails, strict=True) if runs and self.end(own)]

    def end(self, ids):
        """Returns whether the last id completes a string in the text of the ids."""
        if not self.may_end(ids[-1]):
            return False
        text = self.text(ids[-self.tail :])
        return any(string in text for string in self.strings)

    def length(self, ids):
        """Returns the number of ids up to the first that completes a string, or None."""
        return next((n for n in range(1, len(ids) + 1) if self.end(ids[:n])), None)

    def text(self, ids):
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
