"""`python -m unirl.train_diffusion` is `unirl train`, under the public system's name.

It is what launchers start as a rank.
"""

from __future__ import annotations

import sys

from unirl.entry import end_process, main

if __name__ == "__main__":
    end_process(main(["train", *sys.argv[1:]]))
