"""`unirl sample`: images of a checkpoint for prompts of your own.

Exit codes: 0 written, 1 the checkpoint or the model failed, 3 wrong configuration.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from unirl.cli import subject
from unirl.core.errors import ConfigError
from unirl.data.prompts import PROMPT_FILES


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `unirl sample`."""
    command.add_argument(
        "--prompt", dest="prompts", action="append", required=True, help="may be repeated"
    )
    command.add_argument("--output", type=Path, required=True, help="empty or new folder")
    command.add_argument("--num", type=_positive, default=1, help="images of each prompt")
    command.add_argument(
        "--seed", type=int, help="default: the run's, so the same images each time"
    )
    command.add_argument("--steps", type=_positive, help="denoising steps; default: as evaluated")
    command.add_argument("--guidance", type=float, help="default: as evaluated")
    command.add_argument("--height", type=_positive, help="pixels")
    command.add_argument("--width", type=_positive, help="pixels")
    command.add_argument(
        "--image",
        dest="images",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="what a model that edits or continues an image is given beside every prompt",
    )
    subject.add_options(command)


def run(args: argparse.Namespace) -> int:
    """Sample and say what was written."""
    for prompt in args.prompts:
        _require_text(prompt)
    read = subject.read_subject(args, _changes(args))
    if read.config.num_devices > 1:
        raise ConfigError(
            f"num_devices={read.config.num_devices}: unirl sample works on one device. Leave it "
            "out, or share the prompts between several calls with a --output each."
        )
    from unirl.runtime.sample import sample_checkpoint  # imports torch

    written = sample_checkpoint(
        read.config,
        read.checkpoint,
        args.prompts,
        args.num,
        args.output,
        images=args.images,
        shadow=args.shadow,
        with_base=args.base,
    )
    print(read.title)
    for sampled in written:
        print(f"{sampled.file}  {sampled.prompt}")
    return 0


def _require_text(prompt: str) -> None:
    if not prompt.strip():
        raise ConfigError("--prompt is blank. Write the prompt.")
    suffix = Path(prompt).suffix  # without one a file is called like a prompt by chance
    is_prompt_file = suffix in PROMPT_FILES and len(prompt.split()) == 1
    if is_prompt_file or (suffix and os.path.isfile(prompt)):
        raise ConfigError(
            f"--prompt takes a text, but {prompt} is the name of a file. Give each prompt as a "
            "--prompt of its own. For all prompts of a file: unirl evaluate with --prompts FILE "
            "and --output FOLDER."
        )


def _changes(args: argparse.Namespace) -> list[str]:
    asked = {
        "seed": args.seed,
        "eval_sampling.num_inference_steps": args.steps,
        "eval_sampling.guidance_scale": args.guidance,
        "eval_sampling.height": args.height,
        "eval_sampling.width": args.width,
    }
    return [f"{key}={value}" for key, value in asked.items() if value is not None]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return int(text)
