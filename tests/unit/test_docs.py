"""The docs against the code: pages are fresh, links resolve, commands compose, examples run.

A fenced block whose first or second line is a comment with a file name, such as `# mine/a.yaml`,
is written to that file in an empty folder before the commands and examples of its page are tried.
"""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from unirl.checkpoint.store import CheckpointStore
from unirl.cli.check import checked, summary
from unirl.cli.main import _parse, main
from unirl.cli.recipes import recipe_folders
from unirl.tracking.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN_PAGES = [page for page in PAGES if page.parent.name != "reference"]
MAKE_REFERENCE = ROOT / "scripts" / "make_reference.py"


def fenced_blocks(page: Path, language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return fence.findall(page.read_text(encoding="utf-8"))


def file_name(block: str) -> str | None:
    """The file a block stands for."""
    head = "\n".join(block.splitlines()[:2])
    found = re.search(r"^# ([\w./-]+\.(?:yaml|py))$", head, re.MULTILINE)
    return found[1] if found else None


def commands(page: Path) -> list[list[str]]:
    """Arguments of every `unirl ...` in shell blocks and in the text, without placeholders."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`(unirl (?:train|check|plan|recipes)\b[^`\n]*)`", text)
    lines = [line for block in fenced_blocks(page, "sh") for line in block.splitlines()]
    shown = [*(part.strip() for line in lines for part in line.split("&&")), *inline]
    found = [shlex.split(command)[1:] for command in shown if command.startswith("unirl ")]
    return [words for words in found if "RECIPE" not in words and len(words) > 1]


def pages_with(found: Callable[[Path], Sequence[object]]) -> pytest.MarkDecorator:
    """Parametrises a test with the pages in which something is found."""
    pages = [page for page in WRITTEN_PAGES if found(page)]
    return pytest.mark.parametrize("page", pages, ids=_id)


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A working folder with the files that a page shows and empty ones for the models they name."""
    page: Path = request.getfixturevalue("page")
    for block in [*fenced_blocks(page, "yaml"), *fenced_blocks(page, "python")]:
        if name := file_name(block):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(block)
            for model in re.findall(r"^model: {path: (\w+)}", block, re.MULTILINE):
                (tmp_path / model).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def provide_inputs(words: list[str], folder: Path) -> None:
    """What a command expects to find: a checkpoint, a model folder, prompts."""
    for word in words:
        key, _, value = word.partition("=")
        if key == "load_dir":
            CheckpointStore(folder / value / "checkpoints").save(10, lambda empty: None)
        elif key == "model.path":
            (folder / value).mkdir(exist_ok=True)
        elif key == "data.train":
            (folder / value).write_text("".join(f"prompt {n}\n" for n in range(64)))


def without_options(words: list[str]) -> list[str]:
    """What `check` takes of a command: all but the options of `plan`, and --cfg."""
    kept = []
    values = iter(word for word in words if word != "--cfg")
    for word in values:
        if word == "--what-if":
            kept.append(next(values))
        elif word.startswith("--") and not word.startswith("--config"):
            next(values)
        else:
            kept.append(word)
    return kept


@pages_with(commands)
def test_every_command_shown_composes_and_passes_check(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(page):
        provide_inputs(words, folder)
        if "--compare" in words:
            continue
        if words[0] in ("evaluate", "sample"):  # which need a checkpoint
            assert _parse(words).recipe
            continue
        arguments = words if words[0] == "recipes" else ["check", *without_options(words[1:])]
        if words[0] == "plan":  # which needs no weights
            arguments.append("model.path=.")
        assert main(arguments) == 0, f"unirl {' '.join(words)}\n{capsys.readouterr().err}"


@pages_with(lambda page: fenced_blocks(page, "yaml"))
def test_every_yaml_block_is_a_recipe_or_a_piece_of_one(page: Path, folder: Path) -> None:
    for block in fenced_blocks(page, "yaml"):
        name = file_name(block)
        if name is not None:
            own, _, recipe = name.partition("/")
            checked(recipe.removesuffix(".yaml"), [], folder / own)
        else:
            piece = folder / "piece.yaml"
            piece.write_text(f"defaults: [/quickstart, _self_]\n{block}")
            checked(str(piece), [], None)


@pages_with(lambda page: fenced_blocks(page, "python"))
def test_examples_in_python_run(page: Path, folder: Path) -> None:
    names = [file_name(block) for block in fenced_blocks(page, "python")]
    assert all(names), "every example in Python begins with the name of its file"
    for name in names:
        defined = runpy.run_path(str(folder / str(name)))
        for test in [value for key, value in defined.items() if key.startswith("test_")]:
            test()


@pytest.mark.parametrize("page", [ROOT / "docs" / "models" / "own_family.md"], ids=_id)
def test_the_model_family_shown_fulfils_the_contract(page: Path, folder: Path) -> None:
    """It trains, with an engine of its own whose weight sync proves itself in between."""
    assert main(["train", "quickstart", *BLOB_RUN]) == 0
    rows = list(read_rows(folder / "runs" / "quickstart" / "metrics.jsonl"))
    assert [row.optimizer_step for row in rows] == [1, 2]


BLOB_RUN = (
    "model.family=my_family:BlobModel",
    "stack.lora.target_modules=[fc1,fc2]",
    "layout=colocate",
    "reward=jpeg",
    "~eval_rewards",
    "eval_interval=0",
    "num_rollouts=2",
    "batch_size=2",
    "sampling.samples_per_prompt=4",
    "stack.num_updates_per_batch=1",
)


def test_the_first_page_shows_what_check_prints_about_the_quickstart() -> None:
    """Apart from judges whose packages are missing here or there."""
    printed = summary("quickstart", checked("quickstart", [], None)).splitlines()
    expected = "\n".join(line for line in printed if "left out" not in line)
    shown = "\n".join(fenced_blocks(ROOT / "docs" / "start.md", "text"))
    shown = "\n".join(line for line in shown.splitlines() if "  left out" not in line)
    assert expected in shown


def test_the_page_on_planning_shows_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "planning.md"
    whole, last_lines = fenced_blocks(page, "text")
    assert main(commands(page)[0]) == 0
    assert capsys.readouterr().out == whole
    assert main(["plan", "diffusion/sd3/sd3_replica_lora", "--gpu", "rtx4090"]) == 2
    assert capsys.readouterr().out.endswith(last_lines)


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    """Word for word; `...` stands for one value or more."""
    known = [text for file in (ROOT / "unirl").rglob("*.py") for text in texts(file)]
    for block in fenced_blocks(ROOT / "docs" / "troubleshooting.md", "text"):
        parts = [re.escape(part) for part in re.split(r"\.\.\.", block.strip())]
        shown = re.compile(".*".join(parts), re.DOTALL)
        assert any(shown.search(text) for text in known), block


def texts(file: Path) -> Iterator[str]:
    """The string literals of a module, with `...` for each value in them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(p.value) if isinstance(p, ast.Constant) else "..." for p in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("page", WRITTEN_PAGES, ids=_id)
def test_no_number_waits_to_be_measured(page: Path) -> None:
    assert re.findall(r"{{TBD[^}]*}}", page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        destination = (page.parent / path).resolve() if path else page
        assert destination.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(destination), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_reference_pages_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    make = runpy.run_path(str(MAKE_REFERENCE))["main"]
    assert make(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_reference_page_is_noticed(tmp_path: Path) -> None:
    make = runpy.run_path(str(MAKE_REFERENCE))["main"]
    assert make(["--check", "--to", str(tmp_path)]) == 1
    assert make(["--to", str(tmp_path)]) == 0
    assert make(["--check", "--to", str(tmp_path)]) == 0
    (tmp_path / "metrics.md").write_text("# Metrics\n")
    assert make(["--check", "--to", str(tmp_path)]) == 1


def test_the_docs_name_every_shipped_recipe_and_group() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in WRITTEN_PAGES)
    folders = recipe_folders(None)
    missing = [name for name in folders.recipe_names() if name.rpartition("/")[2] not in text]
    groups = sorted({path.parent.name for path in (ROOT / "configs").glob("*/*.yaml")})
    recipes_page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for group in groups:
        row = re.search(rf"^\| `{group}` \| (.+) \|$", recipes_page, re.MULTILINE)
        options = folders.options(group)
        missing += [o for o in options if row is None or f"`{o}`" not in row[1]]
    assert missing == []
