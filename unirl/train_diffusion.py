"""`python -m unirl.train_diffusion` is `unirl train`, under the public system's name."""

from __future__ import annotations

import sys

from unirl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
