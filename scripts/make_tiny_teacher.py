"""Trains the teacher of the distillation recipe: the quickstart with an adapter of rank 8.

Out comes `unirl/assets/tiny/teacher.safetensors`, about 0.2 MB: the adapter after the last rollout,
stored as float16. The quickstart's own adapter does as well as a teacher for students of rank 16;
this one ships, so that the recipe can be run by itself.

    python scripts/make_tiny_teacher.py    # as long as the quickstart
"""

import argparse
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from unirl.checkpoint.finding import find_checkpoint
from unirl.cli.main import main as unirl
from unirl.config.resources import ASSETS

TEACHER = ASSETS / "tiny" / "teacher.safetensors"
RANK, ALPHA = 8, 64.0
"""As in examples/diffusion/tiny/tiny_distillation.yaml; alpha / rank is the quickstart's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="keys of the run, e.g. num_threads=1")
    parser.add_argument("--to", type=Path, default=TEACHER, help="file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = [f"output_dir={folder}", f"stack.lora.rank={RANK}", f"stack.lora.alpha={ALPHA}"]
        code = unirl(["train", "quickstart", *run, *args.overrides])
        if code:
            raise SystemExit(code)
        weights = load_file(find_checkpoint(Path(folder) / "quickstart") / "weights.safetensors")
    halved = {name: tensor.half().contiguous() for name, tensor in weights.items()}
    save_file(halved, args.to, metadata={"rank": str(RANK), "alpha": str(ALPHA)})
    print(f"wrote {args.to}, {args.to.stat().st_size} bytes")


if __name__ == "__main__":
    main()
