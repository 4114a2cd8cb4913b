"""What the site shows from outside of docs/: README, the notebooks and so on, and docstrings as Markdown.

Every page has the path of its file in the repository, so that a link between two of them is right in both. A
notebook has its outputs, where `make notebooks` has run it as it is.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

from griffe import Extension
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
SCRIPT_LINK = re.compile(r"(\]\([\w./]*(?:notebooks|examples)/\w+)\.(?:py|ipynb)(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Moves docs/ to where it is in the repository, and adds the pages from outside of it."""

    def add(path: str, content: str | bytes | None = None) -> None:
        source = str(ROOT / path) if content is None else None
        files.append(File.generated(config, path, content=content, abs_src_path=source))

    for file in list(files):
        if Path(file.abs_src_path or "").is_relative_to(config.docs_dir):
            files.remove(file)
            add(f"docs/{file.src_uri}")
    for path in (*PAGES, *(str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/results/*.png"))):
        add(path)
    for path in ROOT.glob("examples/*.py"):
        add(f"examples/{path.stem}.md", f"# {path.name}\n\n{fenced(path.read_text(), 'python')}")
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        run = ROOT / "build" / "notebooks" / path.name
        fresh = run.exists() and run.stat().st_mtime >= path.stat().st_mtime
        cells = json.loads((run if fresh else path).read_text())["cells"]
        page, pictures = notebook_page(cells, path.stem)
        add(f"notebooks/{path.stem}.md", page)
        for name, picture in pictures.items():
            add(f"notebooks/{name}", picture)
    config.nav = [entry_of(entry, files) for entry in config.nav]
    return files


def entry_of(entry: Any, files: Files) -> Any:
    """An entry of the navigation; `folder/*` is all pages of the folder."""
    if isinstance(entry, dict):
        (((title, path),)) = entry.items()
        if isinstance(path, str) and path.endswith("/*"):
            pages = (file.src_uri for file in files.documentation_pages())
            return {title: sorted(page for page in pages if page.startswith(path[:-1]))}
    return entry


def on_page_markdown(markdown: str, **_page: Any) -> str:
    """A script or notebook has a page."""
    return SCRIPT_LINK.sub(r"\1.md", markdown)


def fenced(text: str, language: str = "") -> str:
    """A code block."""
    return f"````{language}\n{text.rstrip()}\n````\n"


def notebook_page(cells: list[dict[str, Any]], name: str) -> tuple[str, dict[str, bytes]]:
    """Markdown of a notebook's cells and of what they printed; and its pictures, by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(with_mathml(source) if cell["cell_type"] == "markdown" else fenced(source, "python"))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}_{len(pictures)}.png"
                pictures[picture] = b64decode(data["image/png"])
                parts.append(f"![What this cell draws]({picture})\n")
            elif output.get("name") == "stderr":  # a progress bar, a line a step
                continue
            elif text := output.get("text") or data.get("text/plain"):
                parts.append(fenced("".join(text)))
    return "\n".join(parts), pictures


def with_mathml(markdown: str) -> str:
    """Equations as what browsers show without a script."""

    def mathml(found: re.Match[str]) -> str:
        block, inline = found.groups()
        return convert(block or inline, display="block" if block else "inline")

    return re.sub(r"\$\$(.+?)\$\$|\$(.+?)\$", mathml, markdown, flags=re.DOTALL) + "\n"


class Docstrings(Extension):
    """Docstrings as Markdown: examples, tables and lists of parameters keep their form."""

    def on_object(self, *, obj: Any, **_loader: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(doc: str) -> str:
    """Paragraph by paragraph."""
    doc = re.sub(r"^(\w+)\n-{3,}$", r"**\1**\n", doc, flags=re.MULTILINE)
    return "\n\n".join(map(paragraph, re.split(r"\n\s*\n", doc)))


def paragraph(text: str) -> str:
    if text.startswith(">>>"):
        return fenced(text, "pycon")
    if re.search(r"^\S.*\S {3,}\S", text, re.MULTILINE):
        return fenced(text)
    if text.startswith(" "):
        return text
    if text.startswith("**"):
        return text
    # A star is a batch axis, not emphasis; a code span keeps it as it is.
    text = re.sub(r"`[^`]*`|\*", lambda found: found[0] if found[0] != "*" else r"\*", text)
    return re.sub(r"^([\w, ]+?) : ", r"- `\1`: ", text, flags=re.MULTILINE)
