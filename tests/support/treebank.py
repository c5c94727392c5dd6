"""A small treebank for tests."""

from pathlib import Path

NOUNS = ("cat", "dog", "bird", "horse", "fish")
VERBS = ("sees", "likes", "hears")


def sentences(count: int, start: int = 0) -> list[str]:
    """Return the trees of short sentences, such as "the dog sees a cat"."""
    trees = []
    for index in range(start, start + count):
        subject, verb = NOUNS[index % 5], VERBS[index // 5 % 3]
        object_ = f" (NP (DT a) (NN {NOUNS[index // 15 % 5]}))" if index % 2 else ""
        trees.append(f"( (S (NP-SBJ (DT the) (NN {subject})) (VP (VBZ {verb}){object_}) (. .)) )")
    return trees


def write_treebank(folder: Path, *, train: int = 60, dev: int = 8, test: int = 8) -> Path:
    """Write a treebank with one file for each nonempty split, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for split, count in (("train", train), ("dev", dev), ("test", test)):
        if count:
            text = "".join(f"{tree}\n" for tree in sentences(count, start))
            (folder / f"{split}.trees").write_text(text)
        start += count
    return folder
