"""A task's items: records of a file, a folder or a data set of the hub, or random problems."""

import codecs
import hashlib
import json
import random
from pathlib import Path

SPLITS = ("train", "validation", "test")  # of a single file, by each record's text


def records(data, split, config=None):
    """Returns the dicts of `split`. `data` is a file (JSONL, or a JSON array), whose records are
    split here; a folder with SPLIT.jsonl; or a data set on the hub, with its `config`."""
    path = Path(data).expanduser()
    if path.is_dir():
        return lines(path / f"{split}.jsonl")
    if path.suffix in (".jsonl", ".json") or path.is_file():
        found = [x for x in lines(path) if split_of(json.dumps(x, sort_keys=True)) == split]
        if not found:
            why = f"has no record for {split!r}: add some" if split in SPLITS else f"has {SPLITS}"
            raise ValueError(f"{path} {why}, or make a folder with {split}.jsonl")
        return found
    import datasets

    return list(datasets.load_dataset(data, config, split=split))


def lines(path):
    """Returns the objects of a JSONL file, one a line, or of a file that is one JSON array."""
    content, found = path.read_bytes(), []  # bytes: an error in the encoding has a line number
    is_array = content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    for number, text in enumerate([content] if is_array else content.split(b"\n"), start=1):
        try:
            value = json.loads(text) if text.strip() else []
        except ValueError as error:
            why = f"is not JSON in UTF-8: {error}; parquet, csv: datasets.load_dataset('csv', ...)"
            raise ValueError(f"line {number} of {path} {why}") from error
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                raise TypeError(f"line {number} of {path}: {item!r:.80} is no object ({{...}})")
            found.append(item)
    if not found:
        raise ValueError(f"{path} has no records: each of its lines must be an object ({{...}})")
    return found


def generated(make, split, size, home=lambda item: split_of(item["question"])):
    """Returns `size` items with different questions, the same in each call. make(random.Random)
    returns one; home(item) returns the only split that may have it, or None if all may."""
    draw, items = random.Random(split), {}
    while len(items) < size:
        item = make(draw)
        if home(item) in (split, None):
            items[item["question"]] = item
    return list(items.values())


def split_of(key):
    """Returns "train" (80%), "validation" (10%) or "test" (10%), by the MD5 of a text."""
    bucket = int(hashlib.md5(key.encode()).hexdigest(), 16) % 10
    return {0: "test", 1: "validation"}.get(bucket, "train")
