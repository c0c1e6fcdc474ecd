"""Errors a user can cause or must know about. The CLI prints their text without a traceback.

Each message says what was asked, what was found and which key to set.
"""


class UnirlError(Exception):
    """Base of every error whose message is written for the user."""


class ConfigError(UnirlError):
    """The composed configuration cannot run; raised before anything loads."""


class DataError(UnirlError):
    """A prompt file or a prompt record is unusable."""


class RolloutError(UnirlError):
    """A rollout engine did something else than it was asked."""


class RewardError(UnirlError):
    """A scorer failed and the failure policy does not allow to go on."""


class CheckpointError(UnirlError):
    """A checkpoint cannot be written or read; checkpoints already written are untouched."""


class WeightSyncError(UnirlError):
    """The rollout engine does not hold the weights it should hold."""


class ResidencyError(UnirlError):
    """A role was used while parked, or a move of its weights failed."""


class TrainingError(UnirlError):
    """The loss is not a number to train on."""


class ModelError(UnirlError):
    """Model weights or adapters do not fit what the recipe asks for."""


class RankError(UnirlError):
    """Another rank of the run failed."""
