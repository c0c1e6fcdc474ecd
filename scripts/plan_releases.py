"""What published models need for one LoRA run: a table in Markdown, from plans without weights.

    python scripts/plan_releases.py
    python scripts/plan_releases.py flux.2-dev wan2.1-t2v-14b rollout.forward_batch_size=2

The recipe is sd3_replica_lora with batches of one, so that models of all sizes can be read side by
side; words with `=` override its keys. Seconds are those of the whole plan in this process, with
one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from unirl.cli.compose import compose_and_check
from unirl.config.resources import release_names
from unirl.planning.hardware import make_target
from unirl.planning.plan import horizon, make_plan
from unirl.residency.problem import size_text
from unirl.residency.timeline import PhaseKind

RECIPE = "diffusion/sd3/sd3_replica_lora"
OF_ONE = ("rollout.forward_batch_size=1", "stack.micro_batch_size=1")
COLUMNS = (
    "release",
    "trained network",
    "engine with encoders",
    "activations, with checkpointing",
    "fullest rollout",
    "fullest step",
    "moved per window",
    "seconds to plan",
)


def main(argv: Sequence[str]) -> int:
    torch.set_num_threads(1)
    overrides = [word for word in argv if "=" in word]
    names = [word for word in argv if "=" not in word]
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name in names or release_names():
        print(row(name, overrides))
    return 0


def row(release: str, overrides: Sequence[str]) -> str:
    started = time.perf_counter()
    config, _ = compose_and_check(RECIPE, [*OF_ONE, f"model.release={release}", *overrides])
    plan = make_plan(config, make_target(config), ((), ()), horizon(config))
    seconds = time.perf_counter() - started
    sizes = {name: part.num_bytes() for name, part in plan.notes.parts.items()}
    peaks = {peak.kind: peak.total_bytes for peak in plan.peaks}
    space = plan.workspace
    cells = [
        size_text(sizes["train.base"] + sizes["train.adapter"]),
        size_text(sum(size for name, size in sizes.items() if name.startswith("rollout."))),
        f"{size_text(space.train)}, {size_text(space.train_other_checkpointing)}",
        size_text(peaks[PhaseKind.ROLLOUT]),
        size_text(peaks[PhaseKind.TRAIN]),
        size_text(plan.window_traffic.moved_bytes),
        f"{seconds:.1f}",
    ]
    return f"| {release} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
