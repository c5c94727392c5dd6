"""Hooks that MkDocs calls when it builds the documentation site.

Pages link to repository files by relative paths (`../experiments/results/...`), which work on
GitHub. The site contains copies of the linked files. The API reference has one page for the
public API, one for each subpackage, and one for all other modules. Each notebook becomes a page
with the stored outputs. The site serves its own copy of mermaid.js, so its pages do not load
anything from other hosts.

Only `repo_url` in mkdocs.yml states the address of the repository. If it is set, the pages show it
instead of `URL`. If the host is GitHub, each notebook has a button that opens it in Colab.
"""

import json
import posixpath
import re
from collections.abc import Iterable
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from latex2mathml.converter import convert as mathml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "transformer_jax"
INLINE_CODE = re.compile(r"<code>[^<\n]+</code>")
# An option that fits on one line of a phone screen. Its values are included if the code contains
# nothing else.
OPTION = re.compile(r"(?<=<code>)--[^<]{1,36}(?=<)|(?<![\w-])--[a-z][\w.-]{1,34}(?![\w.-])")
LINK = re.compile(r"(\]\(|\]: )([\w./-]+)")
MATH = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|`[^`]*`", re.DOTALL)
COLAB = "https://colab.research.google.com/github"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add repository files, the API reference pages, and mermaid.js to the site."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path in sorted(linked_files(pages)):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    generated = reference_pages() | notebook_pages(config.repo_url or "")
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    mermaid = Path(str(find_spec("mermaidx").origin)).parent / "assets/mermaid.js"
    files.append(File.generated(config, "assets/mermaid.js", abs_src_path=str(mermaid)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Rewrite links to repository files so that they point to the site's copies.

    Also state the repository's address.
    """
    uri = page.file.src_uri
    if config.repo_url:
        markdown = re.sub(r" ?Replace URL[ \n]with[^:]*:", "", markdown)
        markdown = markdown.replace("git clone URL ", f"git clone {config.repo_url} ")
    source = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"

    def rewrite(link: re.Match[str]) -> str:
        path = resolve(source, link[2])
        if not (ROOT / path).is_file():
            return link[0]
        target = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
        return link[1] + posixpath.relpath(target, posixpath.dirname(uri))

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, **_: object) -> str:
    """Mark each short command-line option so that the style sheet can keep it on one line."""
    marked = r'<span class="option">\g<0></span>'
    return INLINE_CODE.sub(lambda code: OPTION.sub(marked, code[0]), html)


def linked_files(pages: list[str]) -> set[str]:
    """Return the files outside docs/ that the pages link to, directly or through other pages."""
    linked: set[str] = set()
    pages = list(pages)
    while pages:
        page = pages.pop()
        for _, link in LINK.findall((ROOT / page).read_text("utf-8")):
            path = resolve(page, link)
            if not path.startswith("docs/") and path not in linked and (ROOT / path).is_file():
                linked.add(path)
                pages += [path] if path.endswith(".md") else []
    return linked


def resolve(page: str, link: str) -> str:
    """Return the repository-relative path of the file that a page links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def reference_pages() -> dict[str, str]:
    """Return the Markdown pages of the API reference, keyed by path."""
    pages = {"reference/index.md": "# Public API\n\n::: transformer_jax\n"}
    for folder in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        blocks = _module_blocks(folder.rglob("*.py"))
        pages[f"reference/{folder.name}.md"] = f"# transformer_jax.{folder.name}\n\n{blocks}"
    pages["reference/modules.md"] = f"# Other modules\n\n{_module_blocks(PACKAGE.glob('*.py'))}"
    return pages


def notebook_pages(address: str) -> dict[str, str]:
    """Return a Markdown page for each notebook, keyed by path."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return {f"notebooks/{path.stem}.md": notebook_page(path, address) for path in paths}


def notebook_page(path: Path, address: str) -> str:
    """Return a notebook as Markdown: its text, code, and outputs, below a badge for Colab."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    blocks = [part for cell in cells for part in cell_blocks(cell)]
    url = urlsplit(address)
    if url.netloc == "github.com":
        link = f"{COLAB}{url.path}/blob/main/notebooks/{path.name}"
        # The first block is the heading.
        blocks.insert(1, f"[Open in Colab]({link}){{ .md-button .md-button--primary }}")
    return "\n\n".join(blocks)


def cell_blocks(cell: dict[str, Any]) -> list[str]:
    """Return the blocks of Markdown for a cell. A heading is a separate block."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        heading, _, text = source.partition("\n")
        parts = [heading, text] if heading.startswith("#") else [source]
        return [MATH.sub(_formula, part).strip() for part in parts]
    return [f"```python\n{source}\n```", *map(output_block, cell["outputs"])]


def output_block(output: dict[str, Any]) -> str:
    """Return the Markdown of a cell's output: a picture, HTML, or text."""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "image/png" in data:
        encoded = data["image/png"].replace("\n", "")
        return f'<p class="output"><img alt="" src="data:image/png;base64,{encoded}"></p>'
    if "text/html" in data:
        return f'<div class="output">{data["text/html"]}</div>'
    text = data.get("text/plain", "".join(output.get("text", [])))
    return f'<pre class="output"><code>{escape(text)}</code></pre>'


def _formula(match: re.Match[str]) -> str:
    block, inline = match.groups()
    if block:
        return f'<div class="equation">{mathml(block, display="block")}</div>'
    return mathml(inline) if inline else match[0]


def _module_blocks(paths: Iterable[Path]) -> str:
    """Return the Markdown directives that mkdocstrings replaces with the modules' documentation."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(paths)
        if not path.name.startswith("__")
    ]
    return "\n".join(f"::: {module}\n" for module in modules)
