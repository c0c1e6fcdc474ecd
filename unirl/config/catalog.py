"""The built-in components by name: where each lives and what it can do. Imports no torch.

A config value that names a component is either a key of one of these tables or a dotted path
`package.module:Class` to the user's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.config.families import MODELS as MODELS
from unirl.core.capabilities import AlgorithmCapabilities, EngineCapabilities, SyncCapabilities


@dataclass(frozen=True)
class EngineEntry:
    path: str
    description: str
    capabilities: EngineCapabilities


@dataclass(frozen=True)
class AlgorithmEntry:
    path: str
    description: str
    capabilities: AlgorithmCapabilities


@dataclass(frozen=True)
class ScorerEntry:
    path: str
    description: str
    requires: tuple[str, ...] = field(default=())
    """Import names of packages the scorer needs."""
    differentiable: bool = False
    """Gradients can go through it."""


@dataclass(frozen=True)
class SyncEntry:
    path: str
    description: str
    capabilities: SyncCapabilities


ENGINES = {
    "trainside": EngineEntry(
        "unirl.rollout.trainside:TrainsideEngine",
        "samples with the train stack's own weights",
        EngineCapabilities(
            shares_train_weights=True, emits_log_probs=True, keeps_adapter_on_sleep=True
        ),
    ),
    "replica": EngineEntry(
        "unirl.rollout.replica:ReplicaEngine",
        "samples with its own copy of the model in the same process",
        EngineCapabilities(
            shares_train_weights=False,
            emits_log_probs=True,
            keeps_adapter_on_sleep=True,
            shares_base=True,
        ),
    ),
    "recorded": EngineEntry(
        "unirl.rollout.recorded:RecordedEngine",
        "returns the images that prompts name; samples where they name none",
        EngineCapabilities(
            shares_train_weights=True,
            emits_log_probs=False,
            keeps_adapter_on_sleep=True,
            returns_recorded=True,
        ),
    ),
}

_RATIO = ("clip_range", "clip_range_high", "clip_schedule", "old_log_prob")
_REFERENCE = ("kl_coefficient", "kl_form", "reference", "ema_decay")
_LEVELS = ("timesteps_per_sample", "timestep_choice")


def _on_transitions(*options: str) -> AlgorithmCapabilities:
    """Of algorithms on recorded stochastic steps with a ratio to the old policy."""
    return AlgorithmCapabilities(
        needs_advantages=True,
        needs_ema_rollout=False,
        supports_multi_update=True,
        needs_stochastic_steps=True,
        options=options,
    )


ALGORITHMS = {
    "flow_grpo": AlgorithmEntry(
        "unirl.algorithms.flow_grpo:FlowGRPO",
        "clipped policy gradient on the log-probs of SDE steps (arXiv:2505.05470)",
        _on_transitions(*_RATIO, *_REFERENCE),
    ),
    "grpo_guard": AlgorithmEntry(
        "unirl.algorithms.grpo_guard:GRPOGuard",
        "Flow-GRPO with ratios normalised per step (arXiv:2510.22319)",
        _on_transitions(
            "clip_range", "clip_range_high", "clip_schedule", "loss_per_time", *_REFERENCE
        ),
    ),
    "flow_dppo": AlgorithmEntry(
        "unirl.algorithms.flow_dppo:FlowDPPO",
        "policy gradient masked by the divergence from the old policy (arXiv:2606.11025)",
        _on_transitions("kl_mask_threshold", *_REFERENCE),
    ),
    "flash_grpo": AlgorithmEntry(
        "unirl.algorithms.flash_grpo:FlashGRPO",
        "one stochastic step per sample, each step's gradient weighed alike",
        _on_transitions(*_RATIO, *_REFERENCE),
    ),
    "tempflow_grpo": AlgorithmEntry(
        "unirl.algorithms.tempflow_grpo:TempFlowGRPO",
        "branches of one path, steps weighed by their noise (arXiv:2508.04324)",
        _on_transitions(*_RATIO, *_REFERENCE, "weight_scale"),
    ),
    "diffusion_nft": AlgorithmEntry(
        "unirl.algorithms.diffusion_nft:DiffusionNFT",
        "positive and negative policies on re-noised samples (arXiv:2509.16117)",
        AlgorithmCapabilities(
            needs_advantages=True,
            needs_ema_rollout=True,
            supports_multi_update=False,
            needs_stochastic_steps=False,
            options=(
                *_LEVELS,
                "mix_beta",
                "old_decay_start",
                "old_decay_rate",
                "old_decay_max",
                "adaptive_weight",
                "kl_coefficient",
            ),
        ),
    ),
    "awm": AlgorithmEntry(
        "unirl.algorithms.awm:AdvantageWeightedMatching",
        "policy gradient on the velocity error of re-noised samples (arXiv:2509.25050)",
        AlgorithmCapabilities(
            needs_advantages=True,
            needs_ema_rollout=False,
            supports_multi_update=True,
            needs_stochastic_steps=False,
            options=(
                *_LEVELS,
                "clip_range",
                "clip_range_high",
                "clip_schedule",
                "error_power",
                "kl_coefficient",
            ),
        ),
    ),
    "diffusion_dpo": AlgorithmEntry(
        "unirl.algorithms.diffusion_dpo:DiffusionDPO",
        "prefers the best sample of a group to the worst (arXiv:2311.12908)",
        AlgorithmCapabilities(
            needs_advantages=False,
            needs_ema_rollout=False,
            supports_multi_update=True,
            needs_stochastic_steps=False,
            needs_groups=True,
            needs_reference=True,
            options=(*_LEVELS, "preference_beta", "reference", "ema_decay"),
        ),
    ),
    "draft": AlgorithmEntry(
        "unirl.algorithms.draft:DRaFT",
        "gradient of the reward through the last steps (arXiv:2309.17400)",
        AlgorithmCapabilities(
            needs_advantages=False,
            needs_ema_rollout=False,
            supports_multi_update=False,
            needs_stochastic_steps=False,
            differentiates_reward=True,
            options=("last_steps", "random_last_steps", "reward_cap", "kl_coefficient"),
        ),
    ),
    "refl": AlgorithmEntry(
        "unirl.algorithms.refl:ReFL",
        "gradient of the reward of one step's clean prediction (arXiv:2304.05977)",
        AlgorithmCapabilities(
            needs_advantages=False,
            needs_ema_rollout=False,
            supports_multi_update=False,
            needs_stochastic_steps=False,
            differentiates_reward=True,
            options=("start_range", "reward_cap", "kl_coefficient"),
        ),
    ),
    "distillation": AlgorithmEntry(
        "unirl.algorithms.distillation:Distillation",
        "on-policy distillation from teacher adapters",
        AlgorithmCapabilities(
            needs_advantages=False,
            needs_ema_rollout=False,
            supports_multi_update=True,
            needs_stochastic_steps=True,
            options=("teachers", "teacher_key", "distill_form"),
        ),
    ),
}

SYNCS = {
    "lora": SyncEntry(
        "unirl.weight_sync.lora:LocalLoraSync",
        "copies the adapter to an engine in the same process",
        SyncCapabilities(staged=True, adapters_only=True),
    ),
    "full": SyncEntry(
        "unirl.weight_sync.full:LocalFullSync",
        "copies every trained weight to an engine in the same process",
        SyncCapabilities(staged=False, adapters_only=False),
    ),
}

SCORERS = {
    "ocr": ScorerEntry(
        "unirl.reward.scorers.ocr:OcrScorer",
        "edit similarity of the text an OCR network reads to metadata.text",
        requires=("onnxruntime", "rapidocr_onnxruntime"),
    ),
    "exact_read": ScorerEntry(
        "unirl.reward.scorers.ocr:ExactReadScorer",
        "1 where an OCR network reads exactly metadata.text, else 0",
        requires=("onnxruntime", "rapidocr_onnxruntime"),
    ),
    "second_ocr": ScorerEntry(
        "unirl.reward.scorers.ocr:SecondOcrScorer",
        "edit similarity read by another OCR network (package rapidocr)",
        requires=("onnxruntime", "rapidocr"),
    ),
    "ocr_ctc": ScorerEntry(
        "unirl.reward.scorers.differentiable_ocr:OcrCtcScorer",
        "log-probability of metadata.text under the network of ocr, differentiable",
        requires=("onnx", "onnxruntime", "rapidocr_onnxruntime"),
        differentiable=True,
    ),
    "color": ScorerEntry(
        "unirl.reward.scorers.color:ColorScorer",
        "closeness of text and background colour to metadata.text_color and metadata.background, "
        "differentiable",
        differentiable=True,
    ),
    "preference": ScorerEntry(
        "unirl.reward.scorers.recorded:PreferenceScorer",
        "1 for the first of a prompt's recorded images, 0 for the others",
    ),
    "jpeg_size": ScorerEntry(
        "unirl.reward.scorers.jpeg:JpegSizeScorer",
        "JPEG (in)compressibility: minus (or plus) kilobytes at quality 95",
    ),
}
