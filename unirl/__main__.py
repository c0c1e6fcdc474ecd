"""`python -m unirl` is the command `unirl`; launchers start it as a rank of `unirl evaluate`."""

from __future__ import annotations

from unirl.entry import end_process, main

if __name__ == "__main__":
    end_process(main())
