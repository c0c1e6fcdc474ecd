"""The built-in components by name: where each lives and what it can do. Imports no torch.

A config value that names a component is either a key of one of these tables or a dotted path
`package.module:Class` to the user's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.core.capabilities import AlgorithmCapabilities, EngineCapabilities, SyncCapabilities


@dataclass(frozen=True)
class ModelEntry:
    path: str
    description: str
    lora_targets: tuple[str, ...]
    size_multiple: int
    """Height and width must be multiples of this."""
    block_classes: tuple[str, ...]
    """Class names of the network's blocks, which are sharded and checkpointed one by one."""
    fixed_size: tuple[int, int] | None = None
    """(height, width) when the network takes one size only."""


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


@dataclass(frozen=True)
class SyncEntry:
    path: str
    description: str
    capabilities: SyncCapabilities


MODELS = {
    "tiny": ModelEntry(
        "unirl.models.tiny:TinyModel",
        "1.9 M-parameter text-to-image flow model that ships with unirl (32 x 16 pixels)",
        lora_targets=("qkv", "proj", "fc1", "fc2"),
        size_multiple=4,
        block_classes=("Block",),
        fixed_size=(16, 32),
    ),
    "sd3": ModelEntry(
        "unirl.models.sd3:StableDiffusion3Model",
        "Stable Diffusion 3 and 3.5 from a diffusers folder",
        lora_targets=(
            "attn.to_q",
            "attn.to_k",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
        ),
        size_multiple=16,
        block_classes=("JointTransformerBlock",),
    ),
}

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
}

ALGORITHMS = {
    "flow_grpo": AlgorithmEntry(
        "unirl.algorithms.flow_grpo:FlowGRPO",
        "clipped policy gradient on the log-probs of SDE steps (arXiv:2505.05470)",
        AlgorithmCapabilities(
            needs_advantages=True,
            needs_ema_rollout=False,
            supports_multi_update=True,
            needs_stochastic_steps=True,
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
    "color": ScorerEntry(
        "unirl.reward.scorers.color:ColorScorer",
        "closeness of text and background colour to metadata.text_color and metadata.background",
    ),
    "jpeg_size": ScorerEntry(
        "unirl.reward.scorers.jpeg:JpegSizeScorer",
        "JPEG (in)compressibility: minus (or plus) kilobytes at quality 95",
    ),
}
