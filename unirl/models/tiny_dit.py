"""A 1.8-million-parameter text-to-image diffusion transformer that samples on a CPU: the network
alone.

In go noisy pixels in [-1, 1], their noise level and the token ids of a prompt; out comes the
velocity of the flow `x_sigma = (1 - sigma) x_0 + sigma noise`, that is `noise - x_0`. Pixel space,
so there is no VAE; the text encoder is an embedding table. Text tokens and image tokens attend to
each other in one sequence, the noise level modulates every block (adaLN, DiT, arXiv:2212.09748).
All projections are plain `nn.Linear`, which is what LoRA tooling looks for.

    model, tokenizer = load_tiny_dit("unirl/assets/tiny/model.safetensors")
    token_ids = tokenizer.encode(['the number "374" in red on white'] * len(latents))
    velocity = model(latents, sigma, token_ids)
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class TinyDiTConfig:
    """Shape of the network. Height and width in pixels; `num_tokens` is the fixed prompt length."""

    vocabulary_size: int
    num_tokens: int = 10
    height: int = 16
    width: int = 32
    patch_size: int = 4
    dim: int = 128
    depth: int = 6
    num_heads: int = 4
    stem_channels: int = 16


class TinyTokenizer:
    """Maps a prompt to a fixed number of ids: whole words, single characters inside double quotes.

        tokenizer = TinyTokenizer(("<pad>", "the", "number", "7"), num_tokens=5)
        tokenizer.encode(['the number "77"'])  # [[1, 2, 3, 3, 0]]

    Id 0 fills the rest, so the empty prompt is all zeros: the unconditional input of the network.
    """

    def __init__(self, vocabulary: tuple[str, ...], num_tokens: int):
        self.vocabulary = tuple(vocabulary)
        self.num_tokens = num_tokens
        self._ids = {word: i for i, word in enumerate(self.vocabulary)}

    def encode(self, prompts: list[str]) -> Tensor:
        """[B, L] int64 token ids."""
        ids = torch.zeros(len(prompts), self.num_tokens, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens = [self._id(word, prompt) for word in split_prompt(prompt)]
            if len(tokens) > self.num_tokens:
                raise ValueError(
                    f"Prompt {prompt!r} has {len(tokens)} tokens, "
                    f"the model reads {self.num_tokens}. Shorten it."
                )
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        return ids

    def _id(self, word: str, prompt: str) -> int:
        if word not in self._ids:
            known = " ".join(self.vocabulary[1:])
            raise ValueError(
                f"Unknown word {word!r} in prompt {prompt!r}. The tiny model knows: {known}"
            )
        return self._ids[word]


def split_prompt(prompt: str) -> list[str]:
    """Words of a prompt in order; text inside double quotes falls apart into its characters."""
    pieces: list[str] = []
    for quoted, word in re.findall(r'"([^"]*)"|([^\s"]+)', prompt):
        pieces.extend(quoted or [word] if word else quoted)
    return pieces


def sincos(position: Tensor, dim: int, max_period: float) -> Tensor:
    """[..., dim] sines and cosines of unit amplitude at geometric frequencies, float32."""
    # Unit amplitude matters: positions initialised at std 0.02 did not train within minutes.
    frequency = torch.exp(
        torch.arange(dim // 2, device=position.device) * (-2 * math.log(max_period) / dim)
    )
    angle = position.float()[..., None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def image_positions(rows: int, columns: int, dim: int) -> Tensor:
    """[rows * columns, dim]: half of the channels encode an image token's row, half its column."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.cat(
        [sincos(row, dim // 2, 100.0), sincos(column, dim // 2, 100.0)], dim=-1
    ).flatten(0, 1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm, then an affine map per sample. x: [B, T, D]; shift, scale: [B, 1, D]."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


class PatchEmbed(nn.Conv2d):
    """[B, C, H, W] pixels to [B, N, D] tokens, one for each patch of p x p pixels.

    A convolution by its weights, computed as the matrix product that it is: on processors with AMX
    the bfloat16 convolution of oneDNN (torch 2.13) with 16 channels and such a stride is wrong.
    """

    def __init__(self, channels: int, dim: int, patch_size: int):
        super().__init__(channels, dim, patch_size, stride=patch_size)

    def forward(self, input: Tensor) -> Tensor:
        size = self.stride[0]
        grid = input.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # [B, C, H/p, p, W/p, p]
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class Attention(nn.Module):
    """Self-attention with layer-normed queries and keys, which keeps logits bounded in bf16."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(dim // num_heads, bias=False)
        self.k_norm = nn.LayerNorm(dim // num_heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # each [B, heads, T, head_dim]
        q, k = self.q_norm(q) / math.sqrt(q.shape[-1]), self.k_norm(k)
        # Spelled out: for 42 tokens on a CPU the fused kernel's backward takes seven times as long.
        attention = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        return self.proj((attention @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention over text and image, a depthwise convolution over the image, a feed-forward."""

    def __init__(self, config: TinyDiTConfig):
        super().__init__()
        dim = config.dim
        self.num_tokens = config.num_tokens
        self.grid = (config.height // config.patch_size, config.width // config.patch_size)
        self.adaLN = nn.Linear(dim, 6 * dim)
        self.attn = Attention(dim, config.num_heads)
        self.local = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)
        self._init_weights(config.depth)

    def _init_weights(self, depth: int) -> None:
        # Gates start open: closed ones (adaLN-zero) only pay in runs longer than minutes.
        gates = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0]).repeat_interleave(self.fc1.in_features)
        nn.init.zeros_(self.adaLN.weight)
        self.adaLN.bias.data.copy_(gates)
        for linear in (self.attn.proj, self.fc2):
            linear.weight.data.div_(math.sqrt(2 * depth))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: [B, L + N, D] text, then image tokens; condition: [B, D] embedded noise level."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN(condition)[:, None].chunk(
            6, dim=-1
        )
        x = x + gate1 * self.attn(modulate(x, shift1, scale1))
        x = self._mix_neighbours(x)
        return x + gate2 * self.fc2(F.relu_(self.fc1(modulate(x, shift2, scale2))))

    def _mix_neighbours(self, x: Tensor) -> Tensor:
        text, image = x[:, : self.num_tokens], x[:, self.num_tokens :]
        grid = image.unflatten(1, self.grid).permute(0, 3, 1, 2)
        return torch.cat([text, image + self.local(grid).permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


class TinyDiT(nn.Module):
    """Velocity network. Rows of a batch never see each other, nothing in it is random."""

    positions: Tensor
    """[L + N, D] position of each text and image token."""

    def __init__(self, config: TinyDiTConfig):
        super().__init__()
        self.config = config
        dim, patch = config.dim, config.patch_size
        rows, columns = config.height // patch, config.width // patch
        self.text_embed = nn.Embedding(config.vocabulary_size, dim)
        self.sigma_fc1 = nn.Linear(dim, dim)
        self.sigma_fc2 = nn.Linear(dim, dim)
        self.stem = nn.Conv2d(3, config.stem_channels, 3, padding=1)
        self.patch_embed = PatchEmbed(config.stem_channels, dim, patch)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_adaLN = nn.Linear(dim, 2 * dim)
        self.unpatch = nn.Linear(dim, config.stem_channels * patch * patch)
        self.head = nn.Conv2d(config.stem_channels, 3, 3, padding=1)
        text_positions = sincos(torch.arange(config.num_tokens), dim, 1000.0)
        positions = torch.cat([text_positions, image_positions(rows, columns, dim)])
        self.register_buffer("positions", positions, persistent=False)
        self._zero_output()

    def _zero_output(self) -> None:
        for last in (self.final_adaLN, self.head):
            for parameter in last.parameters():
                nn.init.zeros_(parameter)

    def forward(self, latents: Tensor, sigma: Tensor, token_ids: Tensor) -> Tensor:
        """Velocity [B, 3, H, W] of latents [B, 3, H, W] at noise level sigma [B] (float32).

        Sigma 1 is pure noise; token_ids is [B, L] from the tokenizer. Runs in the dtype of the
        weights, or under autocast.
        """
        condition = self._embed_sigma(sigma)
        pixels = F.silu(self.stem(latents))
        image = self.patch_embed(pixels)
        x = torch.cat([self.text_embed(token_ids).to(image.dtype), image], dim=1)
        x = x + self.positions.to(x.dtype)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.final_adaLN(condition)[:, None].chunk(2, dim=-1)
        image = self.unpatch(modulate(x[:, self.config.num_tokens :], shift, scale))
        return self.head(F.silu(pixels + self._to_pixels(image)))

    def _embed_sigma(self, sigma: Tensor) -> Tensor:
        """[B, D] embedding of the noise level."""
        features = sincos(1000.0 * sigma, self.config.dim, 10000.0).to(self.sigma_fc1.weight.dtype)
        return F.silu(self.sigma_fc2(F.silu(self.sigma_fc1(features))))

    def _to_pixels(self, tokens: Tensor) -> Tensor:
        """[B, N, C * p * p] image tokens to [B, C, H, W]."""
        config = self.config
        rows = config.height // config.patch_size
        grid = tokens.transpose(1, 2).unflatten(2, (rows, -1))
        return F.pixel_shuffle(grid, config.patch_size)


def save_tiny_dit(
    path: str | Path, model: TinyDiT, tokenizer: TinyTokenizer, dtype: torch.dtype = torch.float16
) -> None:
    """One safetensors file: weights in `dtype`, config and vocabulary as JSON in its metadata."""
    tensors = {
        name: value.detach().to(dtype).contiguous() for name, value in model.state_dict().items()
    }
    metadata = {
        "config": json.dumps(dataclasses.asdict(model.config)),
        "vocabulary": json.dumps(tokenizer.vocabulary),
    }
    save_file(tensors, path, metadata=metadata)


def load_tiny_dit(path: str | Path) -> tuple[TinyDiT, TinyTokenizer]:
    """Network with float32 weights, in evaluation mode, and tokenizer from a saved file."""
    with _reading(path), safe_open(path, framework="pt") as file:
        config, tokenizer = _description(file)
        model = TinyDiT(config)
        names = file.keys()
        model.load_state_dict({name: file.get_tensor(name).float() for name in names})
    return model.eval(), tokenizer


def load_tiny_skeleton(path: str | Path) -> tuple[TinyDiT, TinyTokenizer]:
    """Like load_tiny_dit, with all parameters on the meta device; buffers are real."""
    with _reading(path), safe_open(path, framework="pt") as file:
        config, tokenizer = _description(file)
        with init_empty_weights(include_buffers=False):
            model = TinyDiT(config)
    return model.eval(), tokenizer


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"No tiny model at {path}. scripts/pretrain_tiny.py writes one.")
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not a readable tiny model ({error}). Restore or rebuild the file."
        ) from error


def _description(file: Any) -> tuple[TinyDiTConfig, TinyTokenizer]:
    """What the metadata of an open file says."""
    metadata = file.metadata() or {}
    config = TinyDiTConfig(**json.loads(metadata["config"]))
    vocabulary = tuple(json.loads(metadata["vocabulary"]))
    return config, TinyTokenizer(vocabulary, config.num_tokens)
