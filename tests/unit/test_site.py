"""The docs as a site: it builds strictly, every page is reachable, nothing comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[2]


def build_site(to: Path, **changes: Any) -> None:
    """What `mkdocs build --strict` does; a warning is an `Abort`."""
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(to), strict=True, **changes))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site(folder)
    return folder


def test_the_site_has_every_page_of_the_docs(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    names = {"README.md": "index.html"}
    built = [site / page.with_name(names.get(page.name, f"{page.stem}.html")) for page in pages]
    assert [page for page in built if not page.is_file()] == []


def test_the_site_asks_nothing_of_the_network(site: Path) -> None:
    asked = re.compile(r'<(?:script|img|link|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    pages = site.rglob("*.html")
    assert [found for page in pages for found in asked.findall(page.read_text("utf-8"))] == []


def test_files_that_the_docs_link_to_are_pages_of_the_site(site: Path) -> None:
    recipe = site / "source" / "examples" / "quickstart.yaml.html"
    assert "samples_per_prompt" in recipe.read_text("utf-8")
    assert 'href="source/examples/quickstart.yaml.html"' in (site / "recipes.html").read_text()


def build_small_site(folder: Path, pages: Mapping[str, str]) -> None:
    """Builds other pages with the settings of mkdocs.yml."""
    docs = folder / "docs"
    docs.mkdir()
    for name, text in pages.items():
        (docs / name).write_text(text)
    build_site(folder / "site", docs_dir=str(docs), nav=[{"Home": "README.md"}], extra_css=[])


FAULTS = {
    "a page that is not there": {"README.md": "# Home\n\n[gone](gone.md)\n"},
    "a file that is not there": {"README.md": "# Home\n\n[gone](../gone.py)\n"},
    "a heading that is not there": {"README.md": "# Home\n\n[gone](#gone)\n"},
    "a page that nav leaves out": {"README.md": "# Home\n", "gone.md": "# Gone\n"},
}


@pytest.mark.parametrize("pages", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_in_the_docs_fails_the_build(
    pages: Mapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Abort, match="1 warnings in strict mode"):
        build_small_site(tmp_path, pages)
    assert "gone" in caplog.text


def test_without_a_fault_the_same_pages_build(tmp_path: Path) -> None:
    build_small_site(tmp_path, {"README.md": "# Home\n\n[here](#home)\n"})
    assert (tmp_path / "site" / "index.html").is_file()
