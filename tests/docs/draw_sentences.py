"""Draw random sentences from docstrings, comments, and pages for a fresh reader to grade.

    python tests/docs/draw_sentences.py --seed 1

Give the output to someone who has not seen the code. At least 76 of 80 sentences must be
idiomatic, and none may be opaque.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from pages import passages

MIN_WORDS = 4


def main() -> None:
    """Print numbered sentences. With `--places`, also print each sentence's file and line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--places", action="store_true", help="print file and line")
    parser.add_argument("--under", default="", help="draw only from paths that begin with this")
    arguments = parser.parse_args()
    sentences = [
        (passage.place, sentence)
        for passage in passages()
        if not passage.is_message and not passage.text.startswith(("|", "#", "$$"))
        if passage.place.startswith(arguments.under)
        for sentence in passage.sentences
        if len(sentence.split()) >= MIN_WORDS
    ]
    drawn = random.Random(arguments.seed).sample(sentences, min(arguments.count, len(sentences)))
    for number, (place, sentence) in enumerate(drawn, start=1):
        prefix = f"{place}: " if arguments.places else ""
        sys.stdout.write(f"{number:3}. {prefix}{sentence}\n")


if __name__ == "__main__":
    main()
