"""Tries a small grid of learning rates for every algorithm's recipe on the shipped model.

One protocol for all: half the images of `compare_algorithms.py`, one seed that the comparison does
not use, the recipe's own learning rate times each factor, held-out OCR at the end. Writes and
prints a table. Complete runs are not repeated.

    python scripts/tune_learning_rates.py --output runs/tune
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compare_algorithms import QUICKSTART, RECIPES, Protocol, path_of

from unirl.cli.compose import compose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--recipes", nargs="*", default=[QUICKSTART, *RECIPES])
    parser.add_argument("--factors", nargs="*", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--images", type=int, default=3840, help="sampled in each run")
    args = parser.parse_args()
    names = [f"x {factor:g}" for factor in args.factors]
    lines = [f"| recipe | learning rate | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for recipe in args.recipes:
        rate = compose(path_of(recipe), []).stack.optimizer.learning_rate
        scores = [held_out(args, recipe, rate, factor) for factor in args.factors]
        lines.append(f"| {recipe} | {rate:g} | {' | '.join(scores)} |")
        print(lines[-1], flush=True)
    (args.output / "table.md").write_text("\n".join(lines) + "\n")


def held_out(args: argparse.Namespace, recipe: str, rate: float, factor: float) -> str:
    """Held-out OCR and colour after a run with another learning rate."""
    override = f"stack.optimizer.learning_rate={rate * factor:g}"
    protocol = Protocol(args.output / f"x{factor:g}", args.images, 1, (override,))
    protocol.run(recipe, args.seed)
    points = protocol.points(recipe, args.seed)
    return f"{points[-1].ocr:.3f} ({points[-1].color:.3f})" if points else "failed"


if __name__ == "__main__":
    main()
