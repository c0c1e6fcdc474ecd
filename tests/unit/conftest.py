"""Tests import scripts by the names they have beside `scripts/scaling_table.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
