"""One thing that is wrong with a configuration, and the error that lists all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from unirl.core.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """What was asked, what was found and what to set, for one key."""

    key: str
    """Dotted key, or the recipe's name where no key is to blame."""
    message: str

    def __str__(self) -> str:
        return f"{self.key}\n{textwrap.indent(self.message, '    ')}"


def config_error(recipe: str, problems: Sequence[Problem]) -> ConfigError:
    """The error that lists every problem once."""
    distinct = list(dict.fromkeys(problems))
    count = "1 problem" if len(distinct) == 1 else f"{len(distinct)} problems"
    return ConfigError("\n".join([f"{count} in {recipe}:", *map(str, distinct)]))
