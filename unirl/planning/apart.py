"""The search's input worked out in a process of its own.

A plan of weights in shards needs a process group that pretends to have all ranks, and a rank of a
run has the real one already.

    python -m unirl.planning.apart QUESTION ANSWER   # two pickle files, the second is written
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.config.schema import RunConfig
from unirl.core.components import Component, RebuiltComponent
from unirl.core.errors import ResidencyError, UnirlError
from unirl.planning.recording import RecordingPart
from unirl.residency.problem import ResidencyProblem


@dataclass(frozen=True)
class _Question:
    config: RunConfig
    reward: tuple[tuple[str, int], ...]
    """Names and bytes of the scorers' components."""
    budget_bytes: int


def search_problem_apart(
    config: RunConfig, reward: Sequence[Component], budget_bytes: int
) -> ResidencyProblem:
    """`plan.search_problem` in another process; raises what it raises there."""
    sizes = tuple((part.name, RecordingPart(part).num_bytes()) for part in reward)
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "question", Path(folder) / "answer"
        question.write_bytes(pickle.dumps(_Question(config, sizes, budget_bytes)))
        command = [sys.executable, "-m", "unirl.planning.apart", str(question), str(answer)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if not answer.exists():
            raise ResidencyError(f"the plan of this run failed: {child.stderr[-2000:]}")
        found: ResidencyProblem | UnirlError = pickle.loads(answer.read_bytes())
    if isinstance(found, UnirlError):
        raise found
    return found


def _answer(question: _Question) -> ResidencyProblem | UnirlError:
    from unirl.planning.plan import search_problem  # imports torch

    reward = [_of_size(name, num_bytes) for name, num_bytes in question.reward]
    try:
        return search_problem(question.config, reward, question.budget_bytes)
    except UnirlError as error:
        return error


def _of_size(name: str, num_bytes: int) -> Component:
    return RebuiltComponent(name, lambda: num_bytes, lambda: num_bytes, lambda: num_bytes)


if __name__ == "__main__":
    asked = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps(_answer(asked)))
