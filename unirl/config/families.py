"""The built-in model families: where each lives and what is known of it before weights load."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setting:
    """`key` is `value` in a model folder's `file`."""

    file: str
    key: str
    value: object


@dataclass(frozen=True)
class FileKey:
    """`key` in a model folder's `file`."""

    file: str
    key: str


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    path: str
    description: str
    lora_targets: tuple[str, ...]
    """Ends of the names of the linear layers that an adapter changes unless told otherwise."""
    size_multiple: int
    """Height and width must be multiples of this."""
    block_classes: tuple[str, ...]
    """Class names of the network's blocks, which are sharded and checkpointed one by one."""
    pipelines: tuple[str, ...] = ()
    """`_class_name` of the model_index.json of the folders it reads."""
    fixed_size: tuple[int, int] | None = None
    """(height, width) when the network takes one size only."""
    frame_stride: int | None = None
    """Of video families: num_frames is frames_over more than a multiple of it; None: images."""
    frames_over: int = 1
    min_frames: int = 1
    max_frames: int | None = None
    takes_length: bool = True
    """Reads model.max_sequence_length."""
    length_multiple: FileKey | None = None
    """Where it stands what model.max_sequence_length must be a multiple of."""
    num_images: range = field(default=range(1))
    """How many condition images a prompt may come with."""
    unguided: Setting | None = None
    """What the files of its models without guidance say."""
    takes_guidance: bool = True
    """Any of its models does."""
    has_experts: bool = False
    """Some of its models have a network of their own for low noise."""
    trained_levels: bool = False
    """The network knows the noise levels of its own timesteps only, none of them 1."""


_JOINT_ATTENTION = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
)
"""Attention of both streams, as in most transformers with an image and a text stream."""

_SELF_AND_CROSS_ATTENTION = tuple(
    f"{attention}.{layer}"
    for attention in ("attn1", "attn2")
    for layer in ("to_q", "to_k", "to_v", "to_out.0")
)
"""Attention of blocks that look at the texts after themselves: UNets, Wan, Sana."""

_NO_GUIDANCE_INPUT = Setting("transformer/config.json", "guidance_embeds", False)
"""Of families whose guidance is an input of the network."""

_FLUX2_ATTENTION = (*_JOINT_ATTENTION, "attn.to_qkv_mlp_proj")
"""Blocks of one stream have all their inputs in one layer."""

MODELS = {
    "generic": ModelEntry(
        path="unirl.models.generic:GenericModel",
        description="any other flow-matching pipeline of diffusers, through its own call (slower)",
        lora_targets=(),
        size_multiple=1,
        block_classes=(),
        frame_stride=1,
    ),
    "tiny": ModelEntry(
        path="unirl.models.tiny:TinyModel",
        description="1.9 M-parameter text-to-image flow model that ships with unirl (32 x 16)",
        lora_targets=("qkv", "proj", "fc1", "fc2"),
        size_multiple=4,
        block_classes=("Block",),
        fixed_size=(16, 32),
        takes_length=False,
    ),
    "sd3": ModelEntry(
        path="unirl.models.sd3:StableDiffusion3Model",
        description="Stable Diffusion 3 and 3.5 from a diffusers folder",
        lora_targets=_JOINT_ATTENTION,
        size_multiple=16,
        block_classes=("JointTransformerBlock",),
        pipelines=("StableDiffusion3Pipeline",),
    ),
    "flux": ModelEntry(
        path="unirl.models.flux:FluxModel",
        description="FLUX.1 dev and schnell from a diffusers folder",
        lora_targets=_JOINT_ATTENTION,
        size_multiple=16,
        block_classes=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        pipelines=("FluxPipeline",),
        unguided=_NO_GUIDANCE_INPUT,
    ),
    "wan": ModelEntry(
        path="unirl.models.wan:WanModel",
        description="Wan 2.1 and 2.2, text to video, from a diffusers folder",
        lora_targets=_SELF_AND_CROSS_ATTENTION,
        size_multiple=16,
        block_classes=("WanTransformerBlock",),
        pipelines=("WanPipeline",),
        frame_stride=4,
        has_experts=True,
    ),
    "wan_i2v": ModelEntry(
        path="unirl.models.wan_i2v:WanImageToVideoModel",
        description="Wan 2.1 and 2.2, image to video, from a diffusers folder",
        lora_targets=_SELF_AND_CROSS_ATTENTION,
        size_multiple=16,
        block_classes=("WanTransformerBlock",),
        pipelines=("WanImageToVideoPipeline",),
        frame_stride=4,
        num_images=range(1, 2),
        has_experts=True,
    ),
    "sd15": ModelEntry(
        path="unirl.models.sd15:StableDiffusion15Model",
        description="Stable Diffusion 1.x and 2.x from a diffusers folder",
        lora_targets=_SELF_AND_CROSS_ATTENTION,
        size_multiple=8,
        block_classes=("BasicTransformerBlock", "ResnetBlock2D"),
        pipelines=("StableDiffusionPipeline",),
        trained_levels=True,
        takes_length=False,
    ),
    "sdxl": ModelEntry(
        path="unirl.models.sdxl:StableDiffusionXLModel",
        description="Stable Diffusion XL from a diffusers folder",
        lora_targets=_SELF_AND_CROSS_ATTENTION,
        size_multiple=8,
        block_classes=("BasicTransformerBlock", "ResnetBlock2D"),
        pipelines=("StableDiffusionXLPipeline",),
        trained_levels=True,
        takes_length=False,
    ),
    "qwen_image": ModelEntry(
        path="unirl.models.qwen_image:QwenImageModel",
        description="Qwen-Image from a diffusers folder",
        lora_targets=_JOINT_ATTENTION,
        size_multiple=16,
        block_classes=("QwenImageTransformerBlock",),
        pipelines=("QwenImagePipeline",),
    ),
    "flux2": ModelEntry(
        path="unirl.models.flux2:Flux2Model",
        description="FLUX.2 dev from a diffusers folder",
        lora_targets=_FLUX2_ATTENTION,
        size_multiple=16,
        block_classes=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
        pipelines=("Flux2Pipeline",),
        unguided=_NO_GUIDANCE_INPUT,
    ),
    "flux2_klein": ModelEntry(
        path="unirl.models.flux2:Flux2KleinModel",
        description="FLUX.2 klein from a diffusers folder",
        lora_targets=_FLUX2_ATTENTION,
        size_multiple=16,
        block_classes=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
        pipelines=("Flux2KleinPipeline",),
        unguided=Setting("model_index.json", "is_distilled", True),
    ),
    "sana": ModelEntry(
        path="unirl.models.sana:SanaModel",
        description="Sana and Sana 1.5 from a diffusers folder",
        lora_targets=_SELF_AND_CROSS_ATTENTION,
        size_multiple=32,
        block_classes=("SanaTransformerBlock",),
        pipelines=("SanaPipeline",),
    ),
    "ltx2": ModelEntry(
        path="unirl.models.ltx2:Ltx2Model",
        description="LTX-2, text to video with sound, from a diffusers folder",
        lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
        size_multiple=32,
        block_classes=("LTX2VideoTransformerBlock",),
        pipelines=("LTX2Pipeline",),
        frame_stride=8,
        length_multiple=FileKey(
            "connectors/config.json", "video_connector_num_learnable_registers"
        ),
    ),
    "z_image": ModelEntry(
        path="unirl.models.z_image:ZImageModel",
        description="Z-Image and Z-Image-Turbo from a diffusers folder",
        lora_targets=tuple(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        size_multiple=16,
        block_classes=("ZImageTransformerBlock",),
        pipelines=("ZImagePipeline",),
    ),
    "qwen_image_edit": ModelEntry(
        path="unirl.models.qwen_image_edit:QwenImageEditModel",
        description="Qwen-Image-Edit 2509 and later from a diffusers folder",
        lora_targets=_JOINT_ATTENTION,
        size_multiple=16,
        block_classes=("QwenImageTransformerBlock",),
        pipelines=("QwenImageEditPlusPipeline",),
        num_images=range(1, 4),
    ),
    "flux_kontext": ModelEntry(
        path="unirl.models.flux_kontext:FluxKontextModel",
        description="FLUX.1 Kontext, which edits an image, from a diffusers folder",
        lora_targets=_JOINT_ATTENTION,
        size_multiple=16,
        block_classes=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
        pipelines=("FluxKontextPipeline",),
        num_images=range(1, 2),
        unguided=_NO_GUIDANCE_INPUT,
    ),
    "qwen_image21": ModelEntry(
        path="unirl.models.qwen_image21:QwenImage21Model",
        description="Qwen-Image 2.1, text to image, from a diffusers folder",
        lora_targets=tuple(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        size_multiple=32,
        block_classes=("QwenImage21TransformerBlock",),
        pipelines=("QwenImage21Pipeline",),
    ),
    "minimax_h3": ModelEntry(
        path="unirl.models.minimax_h3:MiniMaxH3Model",
        description="MiniMax-H3, text to video with sound, from a diffusers folder",
        lora_targets=("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        size_multiple=32,
        block_classes=("MiniMaxH3TransformerBlock", "MiniMaxH3TokenRefinerBlock"),
        pipelines=("MiniMaxH3ModularPipeline",),
        frame_stride=17,
        frames_over=5,
        min_frames=124,
        max_frames=345,
        takes_guidance=False,
    ),
    "hunyuan_video": ModelEntry(
        path="unirl.models.hunyuan_video:HunyuanVideoModel",
        description="HunyuanVideo, text to video, from a diffusers folder",
        lora_targets=_JOINT_ATTENTION,
        size_multiple=16,
        block_classes=("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
        pipelines=("HunyuanVideoPipeline",),
        frame_stride=4,
        unguided=_NO_GUIDANCE_INPUT,
    ),
    "hunyuan_video15": ModelEntry(
        path="unirl.models.hunyuan_video15:HunyuanVideo15Model",
        description="HunyuanVideo 1.5, text to video, from a diffusers folder",
        lora_targets=_JOINT_ATTENTION,
        size_multiple=16,
        block_classes=("HunyuanVideo15TransformerBlock",),
        pipelines=("HunyuanVideo15Pipeline",),
        frame_stride=4,
    ),
}
