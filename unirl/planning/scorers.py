"""The reward role's components, from scorers that are built but never asked."""

from __future__ import annotations

from unirl.config import catalog
from unirl.config.components import absent_packages, import_component, is_own
from unirl.config.schema import RunConfig, ScorerConfig
from unirl.core.components import Component
from unirl.reward.scorer import Scorer
from unirl.reward.service import scorer_components as named


def scorer_components(config: RunConfig) -> tuple[list[Component], list[str]]:
    """Components of all scorers and judges, and a remark on each that cannot be built here."""
    asked = dict(config.reward.scorers) if config.reward else {}
    if config.eval_interval > 0:
        asked |= config.eval_rewards
        for suite, own in config.eval_suites.items():
            asked |= {f"{suite}.{name}": scorer for name, scorer in own.scorers.items()}
    components: list[Component] = []
    remarks = []
    for name, scorer in asked.items():
        if scorer.optional and absent_packages(scorer.path):
            continue  # a run leaves it out too
        try:
            components += named(name, _build(scorer))
        except Exception as error:  # anything: it is the user's class, on a machine it may not know
            remarks.append(f"scorer {name}, which cannot be built here: {error}")
    return components, remarks


def _build(config: ScorerConfig) -> Scorer:
    own = is_own(config.path)
    scorer_class = import_component(config.path if own else catalog.SCORERS[config.path].path)
    return scorer_class(**config.args)
