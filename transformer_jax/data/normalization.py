"""Rules that replace characters before SentencePiece splits text into tokens.

SentencePiece stores the rules in the tokenizer model, so every program that uses the model applies
the same rules. The rules use Unicode 3.2, the only version that every release of Python contains,
so they are the same on every machine.
"""

import itertools
from typing import Literal
from unicodedata import ucd_3_2_0

Normalization = Literal["none", "spaces", "nfc", "nfkc"]
"""The values of `data.normalization`."""

# Whitespace characters, from the tab to the ideographic space.
SPACES = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# These characters are the soft hyphen, the zero-width space, two direction marks, the word joiner,
# and the byte-order mark.
INVISIBLE = "\xad\u200b\u200e\u200f\u2060\ufeff"
# The last code point to which Unicode 3.2 assigns a decomposition is below this limit.
END_OF_DECOMPOSITIONS = 0x30000


def normalization_rules(name: Literal["spaces", "nfc"]) -> str:
    """Return the rules as lines of hexadecimal code points: sequence, tab, replacement."""
    rules = _compositions() if name == "nfc" else {}
    # NFC replaces some spaces with other spaces, so add these rules last.
    rules |= dict.fromkeys(SPACES, " ") | dict.fromkeys(INVISIBLE, "")
    return "".join(f"{_to_hex(old)}\t{_to_hex(new)}\n" for old, new in sorted(rules.items()))


def _compositions() -> dict[str, str]:
    """Return the NFC form of each character and of each way to write it with combining marks."""
    normalize = ucd_3_2_0.normalize
    rules: dict[str, str] = {}
    for character in map(chr, range(0x80, END_OF_DECOMPOSITIONS)):
        base, *marks = normalize("NFD", character)
        if base == character:
            continue
        composed = normalize("NFC", character)
        rules[character] = composed
        for order in itertools.permutations(marks):
            for count in range(len(marks) + 1):
                prefix = normalize("NFC", base + "".join(order[:count]))
                written = prefix + "".join(order[count:])
                if normalize("NFC", written) == composed:
                    rules[written] = composed
    return {written: composed for written, composed in rules.items() if written != composed}


def _to_hex(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
