"""Write the plans of all shipped recipes to tests/golden/plans, one JSON file each.

    python scripts/make_golden_plans.py              # all
    python scripts/make_golden_plans.py quickstart   # or those that are named

A test compares them with what the code plans now, so a change of a recipe, or of what moves, shows
as a change of these files. Look at the difference before it is committed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from unirl.cli.compose import compose_and_check
from unirl.cli.recipes import describe_recipes, recipe_folders
from unirl.planning.hardware import make_target
from unirl.planning.plan import horizon, make_plan
from unirl.planning.report import as_json
from unirl.planning.scorers import scorer_components

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "plans"
GPU = "h100-80g"


def shipped_recipes() -> list[str]:
    return [name for name, _ in describe_recipes(recipe_folders(None))]


def golden_file(recipe: str) -> Path:
    return FOLDER / f"{recipe.replace('/', '-')}.json"


def golden_plan(recipe: str) -> dict[str, Any]:
    """A recipe's plan without its list of moves.

    Judges that need a package of their own are left out: not every machine has it.
    """
    config, _ = compose_and_check(recipe, [])
    judges = {name: judge for name, judge in config.eval_rewards.items() if not judge.optional}
    config = config.model_copy(update={"eval_rewards": judges})
    plan = make_plan(config, make_target(config, GPU), scorer_components(config), horizon(config))
    full = as_json(plan, recipe)
    del full["moves"]
    return full


def main() -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for recipe in sys.argv[1:] or shipped_recipes():
        golden_file(recipe).write_text(json.dumps(golden_plan(recipe), indent=1) + "\n")
        print(golden_file(recipe))
    return 0


if __name__ == "__main__":
    sys.exit(main())
