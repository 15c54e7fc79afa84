"""STOP_STRINGS: texts that end a completion, found in the text of its ids.

A completion ends with the first id after which its text has one of the strings; that id stays, with
what it may add behind the string. Only ids that can be the last of a string are looked at, with so
many before them as the longest string may take.
"""

from functools import cache

BEFORE = 4  # ids before a string: decoding takes a space from the first, or has half a character


class StopStrings:
    def __init__(self, tokenizer, strings):
        self.tokenizer, self.strings = tokenizer, tuple(strings)
        # An id is a byte at least; some tokenizers have ids for bytes
        self.tail = BEFORE + max(len(string.encode()) for string in strings)
        self.may_end = cache(self._may_end)

    def _may_end(self, id):
        """Returns whether the id may be the last of a string: whether its text, which for a part of
        a character is U+FFFD, has the last character of one. A space of its own may be lost."""
        text = self.text([id])
        return "\ufffd" in text or any(s[-1] in text or s[-1] == " " for s in self.strings)

    def end(self, ids):
        """Returns whether the last of the ids completes a string in their text."""
        if not self.may_end(ids[-1]):
            return False
        text = self.text(ids[-self.tail :])
        return any(string in text for string in self.strings)

    def length(self, ids):
        """Returns how many of the ids there are up to the one that completes a string, or None."""
        return next((n for n in range(1, len(ids) + 1) if self.end(ids[:n])), None)

    def text(self, ids):
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
