"""`unirl export`: a checkpoint as a LoRA file or a whole model, for diffusers and other programs.

Exit codes: 0 written and read back, 1 the checkpoint or the model has no such export.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(command: argparse.ArgumentParser) -> None:
    """The arguments of `unirl export`."""
    command.add_argument("checkpoint", type=Path, help="run, folder of checkpoints or checkpoint")
    command.add_argument("output", type=Path, help="empty or new folder")
    command.add_argument(
        "--as",
        dest="kind",
        choices=("adapter", "model"),
        help="adapter: a LoRA file; model: everything, the adapter merged in. Default: adapter "
        "where there is one",
    )
    command.add_argument("--model-path", help="where the base model is, if it was moved")
    command.add_argument(
        "--shadow",
        help="export these shadow weights, e.g. old. Default: none, the trained weights",
    )


def run(args: argparse.Namespace) -> int:
    """Export and say what was written."""
    from unirl.runtime.export import ADAPTER, export_checkpoint  # imports torch

    done = export_checkpoint(
        args.checkpoint,
        args.output,
        kind=args.kind,
        model_path=args.model_path,
        shadow=args.shadow,
    )
    print(f"{done.checkpoint} -> {done.path} ({done.num_bytes / 1e6:.1f} MB)")
    if done.kind == ADAPTER:
        print("every tensor was read back as it was written; load it with load_lora_weights")
        for other in done.files:
            if other != done.path:
                print(f"and {other}, which belongs to it: docs/models has how it is loaded")
    else:
        print(f"read back: velocities differ by at most {done.largest_difference:.2g}")
    return 0
