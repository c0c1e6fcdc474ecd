"""The dotted names of all configuration keys, and the one a misspelt key was meant to be."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from functools import cache

from unirl.config.schema import Block, RunConfig

ANY = "<name>"
"""Stands for a name the user chooses, e.g. reward.scorers.<name>.weight."""


@cache
def all_keys() -> tuple[str, ...]:
    """Every key of the schema, blocks included."""
    return tuple(_keys_below("", RunConfig))


def suggest(key: str) -> str:
    """A sentence that names the valid keys nearest to `key`."""
    near = [_MOVED[key]] if key in _MOVED else _nearest(key)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    block = key.rpartition(".")[0]
    siblings = [known for known in all_keys() if known.rpartition(".")[0] == block]
    if not block or not siblings:
        return "`unirl train RECIPE --cfg` prints all keys."
    return f"{block} has: {', '.join(known.rpartition('.')[2] for known in siblings)}."


def nearest_name(name: str, allowed: typing.Iterable[str]) -> str:
    """`Did you mean X?` for a misspelt value, or an empty string."""
    near = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""


def _nearest(key: str) -> list[str]:
    """The same name in another block; else a similar name, best one first."""
    name = _FIELD_WORDS.get(key.rpartition(".")[2], key.rpartition(".")[2])
    by_name: dict[str, list[str]] = {}
    for known in all_keys():
        by_name.setdefault(known.rpartition(".")[2], []).append(known)
    names = [name] if name in by_name else difflib.get_close_matches(name, by_name, 2, 0.75)
    candidates = [known for near in names for known in by_name[near]]
    return sorted(candidates, key=lambda known: -_similarity(key, known))[:2]


_MOVED = {"eval_sampling.eta": "eval_eta"}
"""Keys that one would look for in another block."""

_FIELD_WORDS = {
    "lr": "learning_rate",
    "group_size": "samples_per_prompt",
    "cfg": "guidance_scale",
    "steps": "num_inference_steps",
    "noise_level": "eta",
    "beta": "kl_coefficient",
    "kl_coef": "kl_coefficient",
    "max_steps": "num_rollouts",
    "num_epochs": "num_rollouts",
    "grad_clip": "max_grad_norm",
}
"""Usual words of the field for keys that are spelt out here."""


def _similarity(left: str, right: str) -> float:
    return difflib.SequenceMatcher(a=left, b=right).ratio()


def _keys_below(prefix: str, block: type[Block]) -> Iterator[str]:
    for name, field in block.model_fields.items():
        yield prefix + name
        for inner, suffix in _blocks_in(field.annotation):
            yield from _keys_below(f"{prefix}{name}{suffix}.", inner)


def _blocks_in(annotation: object) -> Iterator[tuple[type[Block], str]]:
    """The blocks a field holds: directly, or by name in a dict."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation, ""
    elif typing.get_origin(annotation) in (types.UnionType, typing.Union):
        for option in typing.get_args(annotation):
            yield from _blocks_in(option)
    elif typing.get_origin(annotation) is dict:
        for inner, _ in _blocks_in(typing.get_args(annotation)[1]):
            yield inner, f".{ANY}"
