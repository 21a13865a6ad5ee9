"""What Triton compiles while requests are served is noticed."""

from __future__ import annotations

import logging

import pytest
import torch

from kvern.engine.compilations import CompilationWatch

triton = pytest.importorskip("triton", reason="Triton is not made for this platform")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402


class NoGpu:
    """A driver to compile with, of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit
def idle_kernel(x_ptr, SIZE: triton.language.constexpr):  # type: ignore[no-untyped-def, name-defined]  # noqa: N803
    """Nothing."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", NoGpu())
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)


def test_a_compilation_after_warm_up_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompilationWatch()
    launch(size=1)
    watch.start()
    with caplog.at_level(logging.WARNING):
        launch(size=1)
        assert watch.count == 0
        launch(size=2)
    assert watch.count == 1
    assert "a kernel was compiled after warm-up, while requests waited: " in caplog.text
    assert "idle_kernel" in caplog.text


def launch(*, size: int) -> None:
    idle_kernel.warmup(torch.float32, SIZE=size, grid=(1,))
