"""Where recipes and config groups lie, and the list `unirl recipes` prints."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import unirl
from unirl.config import catalog
from unirl.config.keys import nearest_name
from unirl.config.problem import Problem, config_error

_PACKAGE = Path(unirl.__file__).parent


@dataclass(frozen=True)
class RecipeFolders:
    """The folders that recipes and config groups are looked up in."""

    own: Path | None
    """The user's --config-dir, absolute."""

    @property
    def examples(self) -> Path:
        """The shipped recipes."""
        return _shipped("examples")

    @property
    def all(self) -> tuple[Path, ...]:
        """The first folder that has a name wins."""
        shipped = (self.examples, _shipped("configs"))
        return shipped if self.own is None else (self.own, *shipped)

    @property
    def with_recipes(self) -> tuple[Path, ...]:
        return self.all[:-1]

    def home(self, name: str) -> Path | None:
        """The folder that has the recipe."""
        homes = (folder for folder in self.with_recipes if (folder / f"{name}.yaml").is_file())
        return next(homes, None)

    def is_folder(self, name: str) -> bool:
        return any((folder / name).is_dir() for folder in self.all)

    def options(self, group: str) -> list[str]:
        """The options of a config group; none for other names."""
        if not group:
            return []
        return sorted(
            {path.stem for folder in self.all for path in (folder / group).glob("*.yaml")}
        )

    def option_file(self, group: str, option: str) -> Path:
        """The file of an option of a config group, the user's first."""
        files = (folder / group / f"{option}.yaml" for folder in self.all)
        return next(file for file in files if file.is_file())

    def nearest(self, name: str) -> str:
        """A suggestion for a name in a defaults list that does not exist."""
        groups = {path.parent.name for path in _shipped("configs").glob("*/*.yaml")}
        near = nearest_name(name.strip("/"), self.recipe_names())
        return near or nearest_name(name.strip("/").partition("/")[0], groups)

    def recipe_names(self) -> list[str]:
        return [name for name, _ in self.recipes()]

    def recipes(self) -> Iterator[tuple[str, Path]]:
        """Name and file of every recipe, the user's first."""
        seen: set[str] = set()
        for folder in self.with_recipes:
            paths = sorted(folder.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
            for path in paths:
                name = path.relative_to(folder).with_suffix("").as_posix()
                if name not in seen and _has_defaults_list(path):
                    seen.add(name)
                    yield name, path


def recipe_folders(config_dir: Path | None) -> RecipeFolders:
    """The folders for a --config-dir; raises ConfigError where it is none."""
    if config_dir is None:
        return RecipeFolders(None)
    own = config_dir.expanduser().resolve()
    if not own.is_dir():
        raise config_error("--config-dir", [Problem(str(config_dir), "is not a folder.")])
    return RecipeFolders(own)


def locate(recipe: str, config_dir: Path | None) -> tuple[str, RecipeFolders]:
    """The recipe's name and the folders to compose it from; a path of a YAML file is both.

    Raises ConfigError when there is no such recipe or folder, with the nearest one.
    """
    folders = recipe_folders(config_dir)
    path = Path(recipe).expanduser()
    if path.suffix == ".yaml" and path.is_file():
        return _locate_file(path.resolve(), folders)
    name = recipe.removesuffix(".yaml").strip("/")
    if folders.home(name) is not None:
        return name, folders
    known = folders.recipe_names()
    by_last_word = {full.rpartition("/")[2]: full for full in known}
    near = difflib.get_close_matches(name.rpartition("/")[2], by_last_word, n=1)
    meant = f" Did you mean {by_last_word[near[0]]}?" if near else ""
    message = f"There is no such recipe.{meant} There are:\n"
    raise config_error(recipe, [Problem(recipe, message + "\n".join(known))])


def _locate_file(path: Path, folders: RecipeFolders) -> tuple[str, RecipeFolders]:
    for folder in folders.with_recipes:
        if path.is_relative_to(folder):
            return path.relative_to(folder).with_suffix("").as_posix(), folders
    return path.stem, RecipeFolders(path.parent)


def describe_recipes(folders: RecipeFolders) -> list[tuple[str, str]]:
    """Name and description of every recipe."""
    return [(name, _description(path)) for name, path in folders.recipes()]


def describe_components() -> list[tuple[str, str, str]]:
    """Key it is the value of, name and description of every built-in component."""
    tables = (
        ("model.family", catalog.MODELS),
        ("rollout.engine", catalog.ENGINES),
        ("algorithm.path", catalog.ALGORITHMS),
        ("reward.scorers.<name>.path", catalog.SCORERS),
    )
    return [
        (key, name, entry.description) for key, table in tables for name, entry in table.items()
    ]


def _shipped(name: str) -> Path:
    """`examples` or `configs`: inside an installed package, else beside it in the repository."""
    installed = _PACKAGE / "_recipes"
    return (installed if installed.is_dir() else _PACKAGE.parent) / name


def _has_defaults_list(path: Path) -> bool:
    return re.search(r"^defaults:", path.read_text(errors="replace"), re.MULTILINE) is not None


def _description(path: Path) -> str:
    """Read from the file's text, so that a recipe with an error elsewhere is still listed."""
    found = re.search(r"^description: *(.+)$", path.read_text(errors="replace"), re.MULTILINE)
    return found.group(1).strip().strip("\"'") if found else ""
