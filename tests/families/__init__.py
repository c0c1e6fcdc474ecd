"""Every built-in family on tiny random weights, beside the diffusers pipeline that it must equal.

A module per family gives its CASES; `tests/unit/models/test_family_proofs.py` runs each proof on
all of them.
"""
