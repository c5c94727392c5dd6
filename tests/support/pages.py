"""The repository's Markdown pages, their commands, the outputs that they show, and all prose.

The prose also includes docstrings, comments, and messages.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# These pages contain the commands that readers run.
GUIDES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted((ROOT / "docs").glob("**/*.md")) if path.is_file()),
)
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "experiments").glob("**/*.md")),
    ROOT / "examples/README.md",
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$(?:\n\n?```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\S+\.py)\n")
TIME = re.compile(r"(\d+) (s|min)\b")


@dataclass(frozen=True)
class Command:
    """A shell command or a Python code block on a page, with its label.

    A label states how long the command takes (`5 s`, `3 min`) or what it needs (`needs a GPU`).
    """

    text: str
    label: str
    language: str = "sh"
    path: str | None = None
    """The path to the file that a Python block shows, or None if the block is code to run."""
    output: str | None = None
    """The standard output that the page shows, in which `...` stands for any text."""

    @property
    def is_tested(self) -> bool:
        """Whether the tests run the command."""
        return TIME.match(self.label) is not None

    @property
    def is_cheap(self) -> bool:
        """Whether the command takes only seconds and does not need earlier commands on the page."""
        time = TIME.match(self.label)
        is_short = time is not None and time.group(2) == "s"
        needs_output = re.search(r"\b(runs|sweeps|reports|activate|digits|my_\w+)\b", self.text)
        return self.language == "sh" and is_short and not needs_output and self.output is None

    def shows(self, output: str) -> bool:
        """Return whether this is the output that the page shows, if it shows any."""
        if self.output is None:
            return True
        pattern = ".*".join(map(re.escape, self.output.strip().split("...")))
        return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[Command]:
    """Return the commands on a page in order.

    The label of a shell command follows `  # ` at the end of its last line. Python blocks that
    begin with `# sketch` are omitted. A block that begins with `# PATH.py` shows that file. A
    `text` block that directly follows another block shows the output of the last command.
    """
    found: list[Command] = []
    for language, body, output in BLOCK.findall(page.read_text("utf-8")):
        if language == "sh":
            for line in body.replace("\\\n", " ").splitlines():
                text, _, label = line.partition("  # ")
                found.append(Command(re.sub(r"\s+", " ", text).strip(), label.strip()))
            if output:
                found[-1] = replace(found[-1], output=output)
        elif language == "python" and not body.startswith("# sketch"):
            file = FILE.match(body)
            found.append(Command(body, "5 s", "python", file and file[1], output or None))
    return found


FOLDERS = ("transformer_jax", "configs", "experiments", "notebooks", "tests", "docs")
# The log is a historical record, test_prose.py contains the banned words, and the tables under
# experiments/results/ are generated.
SKIPPED = {
    ROOT / "experiments/LOG.md",
    ROOT / "tests/docs/test_prose.py",
    *set((ROOT / "experiments/results").glob("*/*.md")),
}
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
# Each list item, table row, heading, and entry under `Args:` begins a new passage.
ITEM = re.compile(r"\s*(?:[-*|]|\d+\.|#+) ")
ITEM_OR_ENTRY = re.compile(rf"{ITEM.pattern}|\s*\w+:(?: |$)")
CODE = re.compile(r"`+[^`]*`+")


class Passage(NamedTuple):
    """A paragraph or a list item in a file."""

    path: Path
    line: int
    text: str
    is_message: bool = False
    """Whether the passage is a string other than a docstring, such as an error message."""

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def sentences(self) -> list[str]:
        text = re.sub(r"^[-*] |^\d+\. ", "", re.sub(r"\s+", " ", self.text).strip())
        return SENTENCE_END.split(text)


def passages() -> Iterator[Passage]:
    """Yield the prose of all Python files, and then of all Markdown files."""
    for folder in FOLDERS:
        for path in sorted(ROOT.glob(f"{folder}/**/*.py")):
            if path not in SKIPPED:
                yield from _strings(path)
                yield from _comments(path)
    for path in PAGES:
        if path not in SKIPPED:
            yield from _paragraphs(path)


def _strings(path: Path) -> Iterator[Passage]:
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_docstring = id(node) in docstrings
            if is_docstring or " " in node.value.strip():
                for offset, text in _split_paragraphs(node.value, ITEM_OR_ENTRY):
                    if not (is_docstring and _is_literal_block(node, offset)):
                        yield Passage(path, node.lineno + offset, text, not is_docstring)


def _is_literal_block(docstring: ast.Constant, offset: int) -> bool:
    """Return whether a paragraph is a code block, which is indented and follows a blank line."""
    lines = str(docstring.value).splitlines()
    indent = len(lines[offset]) - len(lines[offset].lstrip())
    return offset > 0 and not lines[offset - 1].strip() and indent > docstring.col_offset


def _comments(path: Path) -> Iterator[Passage]:
    """Yield each comment. Consecutive comment lines form a single comment.

    The text of a notebook is also stored in comments. An empty comment ends a paragraph, and each
    list item is a separate passage.
    """
    block: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type != tokenize.COMMENT or re.match(
            r"#$|# (type|noqa|fmt|pyrefly|sketch|%%)", token[1]
        ):
            continue
        is_item = ITEM.match(token.string.removeprefix("# "))
        if block and (token.start[0] != block[-1].start[0] + 1 or is_item):
            yield _joined(path, block)
            block.clear()
        block.append(token)
    if block:
        yield _joined(path, block)


def _joined(path: Path, comments: list[tokenize.TokenInfo]) -> Passage:
    text = " ".join(comment.string.removeprefix("#").strip() for comment in comments)
    return Passage(path, comments[0].start[0], text)


def _paragraphs(path: Path) -> Iterator[Passage]:
    """Yield the paragraphs, headings, list items, and table rows of a page, but no code blocks."""
    text = re.sub(
        r"^```.*?^```$",
        lambda fence: "\n" * fence[0].count("\n"),
        path.read_text("utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    for offset, paragraph in _split_paragraphs(text, ITEM):
        yield Passage(path, 1 + offset, paragraph)


def _split_paragraphs(text: str, item: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Yield each paragraph or item with the number of lines before it."""
    block: list[str] = []
    start = 0
    for number, line in enumerate([*text.splitlines(), ""]):
        if block and (not line.strip() or item.match(line)):
            yield start, "\n".join(block)
            block.clear()
        if line.strip():
            start = start if block else number
            block.append(line)
