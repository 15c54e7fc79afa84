"""Reads a task's records from a file, a folder, or a data set of the hub, and splits records."""

import hashlib
import json
from pathlib import Path

TEST_EVERY = 10  # of a single file, every 10th record is for the test, all others for training


def records(data, split, config=None):
    """Returns the dicts of `split`. `data` is a JSONL file, whose records are split here; a folder
    with SPLIT.jsonl; or a data set on the hub, with its `config`."""
    path = Path(data).expanduser()
    if path.is_dir():
        return lines(path / f"{split}.jsonl")
    if path.suffix in (".jsonl", ".json") or path.is_file():
        found = lines(path)
        test = found[::TEST_EVERY]
        del found[::TEST_EVERY]
        return found if split == "train" else test
    import datasets

    return list(datasets.load_dataset(data, config, split=split))


def lines(path):
    """Returns the objects of a JSONL file, one a line."""
    found = []
    with path.open("rb") as file:  # bytes: an error in the encoding then has a line number
        for number, line in enumerate(file, start=1):
            try:
                found += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                why = f"line {number} of {path} is not JSON in UTF-8: {error}"
                raise ValueError(why) from error
    return found


def split_of(key):
    """Returns "train" (80 %), "validation" (10 %) or "test" (10 %), by the MD5 of a text."""
    bucket = int(hashlib.md5(key.encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")
