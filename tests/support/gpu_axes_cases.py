"""What test_axes.py shares with other tests."""

from __future__ import annotations

from dataclasses import replace

from axes_cases import ROUTED
from plans import MODEL

WIDE = replace(MODEL, hidden=64, heads=8, kv_heads=8, ffn=64, head_dim=16)


WIDE_MIXED = replace(WIDE, layers=4, experts=replace(ROUTED, intermediate_size=32, shared_intermediate_size=32))
