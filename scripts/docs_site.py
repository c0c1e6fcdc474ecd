"""What the docs site adds to the pages: the files of this repository that they link to.

mkdocs calls the two functions below (`hooks` in mkdocs.yml). On a code host a link such as
`../examples/quickstart.yaml` opens the file; a site has only what is below docs/. So each such file
becomes a page `source/examples/quickstart.yaml.html` with its text, a folder a list of its files,
and links lead there. A link to what does not exist is left as it is, for mkdocs to complain of.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

# A relative link upwards, up to its anchor or its end.
LINK = re.compile(r"\]\((\.\./[^)\s#]+)")
LANGUAGES = {".md": "markdown", ".py": "python", ".toml": "toml", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every file and folder outside docs/ that a page links to."""
    root = Path(config.docs_dir).parent
    outside = {
        path
        for file in files.documentation_pages()
        for target in LINK.findall(file.content_string)
        if (path := repository_path(file.src_uri, target)) and (root / path).exists()
    }
    for path in sorted(outside):
        text = source_page(root, path)
        page = File.generated(
            config, page_uri(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV
        )
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that leave docs/ to the pages of `on_files`, which no search finds.

    The first page has no side bar.
    """
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}

    def moved(link: re.Match[str]) -> str:
        path = repository_path(page.file.src_uri, link[1])
        if path is None or files.get_file_from_path(page_uri(path)) is None:
            return link[0]
        return f"]({posixpath.relpath(page_uri(path), posixpath.dirname(page.file.src_uri))}"

    return LINK.sub(moved, markdown)


def repository_path(page_uri: str, target: str) -> str | None:
    """Where a link leads, from the repository's root; None where that is inside docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page_uri), target))
    return None if path.startswith(("docs/", "..")) else path


def page_uri(path: str) -> str:
    """The page for a file of the repository."""
    return f"source/{path}.md"


def source_page(root: Path, path: str) -> str:
    """Markdown that shows a file, or what a folder holds."""
    if (root / path).is_dir():
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in folder_files(root / path))
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (root / path).read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~~~{language}\n{text.rstrip()}\n~~~~~~\n"


def folder_files(folder: Path) -> Iterator[str]:
    """Files below a folder, by their path in it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix()
