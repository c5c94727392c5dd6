"""The repository's Markdown pages and the commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

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
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
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
        return self.language == "sh" and is_short and not needs_output


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[Command]:
    """Return the commands on a page in order.

    The label of a shell command follows `  # ` at the end of its last line. Python blocks that
    begin with `# sketch` are omitted. A block that begins with `# PATH.py` shows that file.
    """
    found = []
    for language, body in FENCE.findall(page.read_text("utf-8")):
        if language == "sh":
            for line in body.replace("\\\n", " ").splitlines():
                text, _, label = line.partition("  # ")
                found.append(Command(re.sub(r"\s+", " ", text).strip(), label.strip()))
        elif language == "python" and not body.startswith("# sketch"):
            file = FILE.match(body)
            found.append(Command(body, "5 s", "python", file and file[1]))
    return found
