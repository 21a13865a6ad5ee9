"""The model's operations, a folder each."""

from __future__ import annotations

import os

# Triton reads it when it compiles, and its default is to change. Kernels that must not fuse say so themselves.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
