"""Which prompts a run is evaluated on, data.eval and then suites, and what is watched there."""

from __future__ import annotations

from dataclasses import dataclass

from unirl.config.schema import RunConfig
from unirl.core.types import MAIN_SUITE


@dataclass(frozen=True)
class AskedSuite:
    """One prompt file, and how much of it."""

    name: str
    key: str
    """Names the file, for messages."""
    path: str
    count_key: str
    num_prompts: int | None
    """None: the whole file."""
    samples_per_prompt: int


def asked_suites(config: RunConfig) -> tuple[AskedSuite, ...]:
    """In the order of evaluation; none with eval_interval=0."""
    if config.eval_interval == 0:
        return ()
    is_held_out = config.data.eval is not None
    main = AskedSuite(
        name=MAIN_SUITE,
        key="data.eval" if is_held_out else "data.train",
        path=config.data.eval or config.data.train,
        count_key="eval_num_prompts",
        num_prompts=config.eval_num_prompts,
        samples_per_prompt=config.eval_samples_per_prompt,
    )
    own = (
        AskedSuite(
            name=name,
            key=f"eval_suites.{name}.data",
            path=suite.data,
            count_key=f"eval_suites.{name}.num_prompts",
            num_prompts=suite.num_prompts,
            samples_per_prompt=suite.samples_per_prompt or config.eval_samples_per_prompt,
        )
        for name, suite in config.eval_suites.items()
    )
    return (main, *own)


def watched_scores(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """What the reward does not ask for, by suite: judges of data.eval, and of further suites the
    scorers that the reward has not.

    A scorer of the reward may fall while another one rises, as their weights decide.
    """
    scorers = {} if config.reward is None else config.reward.scorers
    asked = [(scorer.path, scorer.args) for scorer in scorers.values() if scorer.weight != 0]
    of_suites = {
        suite: tuple(
            name for name, own in block.scorers.items() if (own.path, own.args) not in asked
        )
        for suite, block in config.eval_suites.items()
    }
    return {MAIN_SUITE: tuple(config.eval_rewards), **of_suites}
