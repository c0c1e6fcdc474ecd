"""`python -m unirl.train_diffusion` is `unirl train`, under the public system's name.

It is what launchers start as a rank.
"""

from __future__ import annotations

import logging
import os
import sys

from unirl.entry import main

if __name__ == "__main__":
    exit_code = main(["train", *sys.argv[1:]])
    if "RANK" in os.environ:
        # All is closed by now. Threads of torch's process groups can abort an interpreter that
        # takes itself apart (std::terminate), and a run that went well would end as a failure.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
