"""Kernels that Triton compiles once requests are served: each holds up all of them, so there should be none."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class CompilationWatch:
    """Counts and logs what Triton compiles, or loads from its cache on disk, from now on."""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        """Ask Triton to tell. It asks one only, the last."""
        import triton  # a CPU does without it

        triton.knobs.runtime.jit_post_compile_hook = self._on_compiled

    def _on_compiled(self, *, repr: str, **_: Any) -> None:
        self.count += 1
        logger.warning("a kernel was compiled after warm-up, while requests waited: %s", repr)
