"""Tests under Triton's interpreter, which `test_triton_interpreted.py` starts in processes of their own.

A process either interprets kernels or compiles them. So a plain run of pytest collects nothing here.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
