"""Convert text from runs and models to a form that pages and figures can display."""

import re

# The pattern matches control characters, surrogates, noncharacters, line separators, and
# bidirectional formatting characters. XML forbids most of the first three kinds, and the other
# kinds would change how the surrounding text is displayed.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    r"""Return text in which unprintable characters are escaped, for example as `\x1b`."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def truncate(text: str, limit: int) -> str:
    """Truncate text to at most `limit` characters, with an ellipsis in place of the rest."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def printable_label(text: str) -> str:
    """Escape text for matplotlib, which interprets text between dollar signs as a formula."""
    return printable(text).replace("$", r"\$")
