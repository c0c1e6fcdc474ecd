"""The scorer contract: images and their prompt records in, one number per image out.

    class Brightness(Scorer):
        def score(self, images, records):
            return images.float().mean(dim=(1, 2, 3)) / 255

A recipe names it by path: `reward: {scorers: {bright: {path: my_pkg.rewards:Brightness}}}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from unirl.core.components import Component
from unirl.core.types import PromptRecord


class Scorer(ABC):
    """Scores images. Constructor arguments come from the recipe's `args`."""

    @abstractmethod
    def score(self, images: Tensor, records: Sequence[PromptRecord]) -> Sequence[float] | Tensor:
        """One finite number per image, for images [B, 3, H, W] uint8 on the CPU.

        Raise to report a failure; never return a stand-in value for one.
        """

    def components(self) -> Sequence[Component]:
        """What the scorer holds on the device, moved when the reward role is parked."""
        return ()

    def required_metadata(self) -> Sequence[str]:
        """Metadata fields every prompt record must have; checked before the run starts."""
        return ()
