"""Write the reference pages of the docs from the code: every config key and every metric.

    python scripts/make_reference.py            write docs/reference/config.md and metrics.md
    python scripts/make_reference.py --check    write nothing, exit 1 when a page is stale

Types, defaults and bounds come from the pydantic schema, meanings from the docstring under each
field of unirl/config/schema.py; metrics come from the catalogue in unirl.tracking.metrics.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import unirl.config.schema as schema
from unirl.tracking.metrics import AXES, METRICS, PANELS

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"

CONFIG_HEAD = """\
# Configuration reference

Every key, with its type, bounds, default and meaning. Each can be set in a recipe or on the command
line as `key=value`, nested keys with dots: `stack.lora.rank=8`.
"""

METRICS_HEAD = """\
# Metrics reference

Every metric a run can log, in `metrics.jsonl` and in every tracker. `<...>` stands for the name of
a scorer, judge, role or phase. Log-probs and KLs are means over latent elements.
"""

NOTICE = "\nThis page is written by `scripts/make_reference.py`; change the code, not the page.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 when --check finds a page that the code no longer gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare, exit 1 when stale")
    parser.add_argument("--to", type=Path, default=REFERENCE, help="folder of the pages")
    args = parser.parse_args(argv)
    pages = {args.to / "config.md": config_page(), args.to / "metrics.md": metrics_page()}
    stale = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    if args.check:
        for path in stale:
            print(f"{path} is stale: run python scripts/make_reference.py", file=sys.stderr)
        return 1 if stale else 0
    args.to.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(pages[path])
        print(f"wrote {path}")
    return 0


def config_page() -> str:
    """One table of keys per block, top-level keys first."""
    full = schema.RunConfig.model_json_schema()
    blocks = full["$defs"]
    meanings = _docstrings(Path(schema.__file__).read_text())
    sections = [CONFIG_HEAD + NOTICE, "## Top level\n"]
    sections.append(_key_table(full, "RunConfig", "", meanings))
    for name, prefixes in _places(full, blocks).items():
        sections.append(f"## {' and '.join(f'`{prefix}`' for prefix in prefixes)}\n")
        sections.append(f"{blocks[name].get('description', '')}\n")
        sections.append(_key_table(blocks[name], name, f"{prefixes[0]}.", meanings))
    return "\n".join(sections)


def metrics_page() -> str:
    """One table per group of metrics."""
    sections = [METRICS_HEAD + NOTICE]
    for group, names in groupby(METRICS, key=lambda name: name.partition("/")[0]):
        rows = [(f"`{name}`", METRICS[name].unit, METRICS[name].meaning) for name in names]
        sections += [f"## `{group}/`\n", _table(("metric", "unit", "meaning"), rows)]
    axes = [(f"`{name}`", axis.unit, axis.meaning) for name, axis in AXES.items()]
    sections += ["## Axes of wandb and trackio\n", _table(("axis", "unit", "meaning"), axes)]
    panels = [(f"`{name}`", meaning) for name, meaning in PANELS.items()]
    sections += ["## Pictures\n", _table(("panel", "meaning"), panels)]
    return "\n".join(sections)


def _docstrings(source: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the docstring that follows the field."""
    found = {}
    for block in ast.parse(source).body:
        if not isinstance(block, ast.ClassDef):
            continue
        for field, after in pairwise(block.body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[block.name, field.target.id] = " ".join(str(after.value.value).split())
    return found


def _places(full: Mapping[str, Any], blocks: Mapping[str, Any]) -> dict[str, list[str]]:
    """Block -> the keys it stands at, in the order of the schema."""
    places: dict[str, list[str]] = {}

    def visit(block: Mapping[str, Any], prefix: str) -> None:
        for key, field in block["properties"].items():
            for name, suffix in _references(field):
                places.setdefault(name, []).append(f"{prefix}{key}{suffix}")
                visit(blocks[name], f"{prefix}{key}{suffix}.")

    visit(full, "")
    return places


def _references(field: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The blocks a field holds: directly, as one of several types, or by a name in a map."""
    if "$ref" in field:
        yield field["$ref"].rpartition("/")[2], ""
    for option in field.get("anyOf", ()):
        yield from _references(option)
    inner = field.get("additionalProperties")
    if isinstance(inner, dict):
        yield from ((name, ".<name>") for name, _ in _references(inner))


def _key_table(
    block: Mapping[str, Any], name: str, prefix: str, meanings: Mapping[tuple[str, str], str]
) -> str:
    rows = [
        (
            f"`{prefix}{key}`",
            _type(field),
            "required" if key in block.get("required", ()) else _default(field),
            meanings.get((name, key), ""),
        )
        for key, field in block["properties"].items()
    ]
    return _table(("key", "type", "default", "meaning"), rows)


def _type(field: Mapping[str, Any]) -> str:
    """A JSON schema type in words, with its bounds."""
    if "$ref" in field:
        return "block"
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    match field.get("type"):
        case "array":
            length = f" of {field['minItems']}" if "minItems" in field else ""
            return f"list{length}: {_type(field['items'])}"
        case "object":
            return "map of blocks by name" if any(_references(field)) else "map"
        case "string":
            return "text"
        case "boolean":
            return "`true`, `false`"
        case "null":
            return "`null`"
        case kind:
            word = {"integer": "whole number", "number": "number"}[str(kind)]
            return " ".join([word, *_bounds(field)])


def _bounds(field: Mapping[str, Any]) -> Iterator[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field]
    if bounds:
        yield ", ".join(bounds)


def _default(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return "see below"
    default = field["default"]
    if isinstance(default, dict) and default:
        return "see below"
    return f"`{default if isinstance(default, str) and default else json.dumps(default)}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines) + "\n"


def _escape(cell: str) -> str:
    """Markdown shows the cell's own signs: outside code `*` and `<` mean something else."""
    signs = r"\|" if cell.startswith("`") else r"[|*<]"
    return re.sub(signs, lambda sign: f"\\{sign[0]}", cell)


if __name__ == "__main__":
    sys.exit(main())
