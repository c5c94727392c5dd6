"""Hooks that MkDocs calls when it builds the documentation site.

Pages link to repository files by relative paths (`../experiments/results/...`), which work on
GitHub. The site contains copies of these files. The API reference has one page for each subpackage.
The site serves mermaid.js from its own host, so it does not load anything from other hosts.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "transformer_jax"
OUTSIDE = re.compile(r"(\]\(|\]: )\.\./([\w./-]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add repository files, the API reference pages, and mermaid.js."""
    pages = [file.content_string for file in files.documentation_pages()]
    for path in sorted({path for page in pages for _, path in OUTSIDE.findall(page)}):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    for path, content in reference_pages().items():
        files.append(File.generated(config, path, content=content))
    mermaid = Path(str(find_spec("mermaidx").origin)).parent / "assets/mermaid.js"
    files.append(File.generated(config, "assets/mermaid.js", abs_src_path=str(mermaid)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Rewrite links to repository files so that they point to the site's copies."""
    return OUTSIDE.sub(r"\1repository/\2", markdown)


def reference_pages() -> dict[str, str]:
    """Return the Markdown pages of the API reference, keyed by path."""
    pages = {"reference/index.md": "# Public API\n\n::: transformer_jax\n"}
    for folder in sorted(path.parent for path in PACKAGE.glob("*/__init__.py")):
        modules = [
            ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for path in sorted(folder.rglob("*.py"))
            if path.name != "__init__.py"
        ]
        blocks = "\n".join(f"::: {module}\n" for module in modules)
        pages[f"reference/{folder.name}.md"] = f"# transformer_jax.{folder.name}\n\n{blocks}"
    return pages
