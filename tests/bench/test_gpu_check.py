"""The check of a GPU, without one: stages, deadlines, report and table; each stage's code on a CPU or on stubs."""

from __future__ import annotations

import fcntl
import json
import re
import runpy
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not made for this platform", allow_module_level=True)

import gpu_check
import gpu_check_engine
import gpu_check_kernels
import gpu_check_rates
import gpu_check_steps
import gpu_check_tuning
from gpu_check_finding import Finding, StageReport, Status, format_table, read_figures, write_report
from gpu_check_kernels import COPIES, PRODUCTS, READS
from gpu_check_stage import ROOT, Stage, run_stage

from kvern.kernels.check import find_checks
from kvern.kernels.launch_case import find_cases
from kvern.kernels.paged_attention import configurations
from kvern.kernels.paged_attention.bench import Measured

STUBS = """
import fcntl, subprocess, sys, time
from gpu_check_finding import Finding
from gpu_check_stage import in_workers

def quick(device, known):
    yield Finding("speed", 2.0, "GB/s", at_least=3.0)
    yield Finding("sum", 1.0 + known.get("speed", 0.0))

def wrong(device, known):
    yield Finding("a", error="1 is not 2")
    yield Finding("b")

def broken(device, known):
    yield Finding("a")
    raise RuntimeError("out of memory")

def look(name, device):
    return "" if name == device else f"{name} is not {device}"

def shared(device, known):
    yield from in_workers(look, ["one", "two"], device)

def slow(device, known):
    lock = open(device, "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    subprocess.Popen(["sleep", "1000"], pass_fds=[lock.fileno()])
    yield Finding("early", 1.0, "s")
    time.sleep(1000)
"""

BARE = """
import sys

class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"no module {name}", name=name)

ABSENT = {
    "click", "gguf", "grpc", "llguidance", "numba", "numpy", "opentelemetry", "pydantic", "redis", "rich",
    "safetensors", "structlog", "transformers",
}
sys.meta_path.insert(0, Bare())

import gpu_check_engine, gpu_check_kernels, gpu_check_rates, gpu_check_steps, gpu_check_tuning
import kvern.kernels.check, kvern.kernels.launch_case
from gpu_check_finding import Finding

def run(device, known):
    yield Finding("cases", float(len(kvern.kernels.launch_case.find_cases())))
    yield Finding("checks", float(len(kvern.kernels.check.find_checks())))
"""

INTERPRETED = """
import gpu_check_kernels
from kvern.kernels.check import Check, find_checks
from kvern.kernels.launch_case import find_cases

def differs(device):
    raise AssertionError("1 is not 2")

def run(device, known):
    found = {name: check for name, check in find_checks().items() if name.startswith("token_mask: 31 ")}
    gpu_check_kernels.find_checks = lambda: found | {"differs": Check("differs", differs)}
    yield from gpu_check_kernels.compare_with_references(device, known)
    cases = {name: case for name, case in find_cases().items() if name.startswith("block_copy: odd")}
    gpu_check_kernels.find_cases, gpu_check_kernels.ENGINES = lambda: cases, {"engine": "interpreted:differs"}
    yield from gpu_check_kernels.compile_cases(device, known)
"""


@pytest.fixture
def stub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules stages find."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "stubs.py").write_text(STUBS)
    return tmp_path


def test_stages_rewrite_the_report_and_know_earlier_figures(stub_folder: Path) -> None:
    report = stub_folder / "report.json"
    stages = [Stage("first", "stubs:quick", 30), Stage("second", "stubs:quick", 30)]
    done = gpu_check.run_stages(stages, "cpu", report)
    assert [stage.status for stage in done] == [Status.DONE, Status.DONE]
    assert done[1].findings[1] == Finding("sum", 3.0)
    written = json.loads(report.read_text())["stages"]
    assert [(stage["name"], stage["status"]) for stage in written] == [("first", "done"), ("second", "done")]
    assert gpu_check.exit_status(done) == 0


def test_late_stage_is_stopped_with_what_it_started_and_the_next_one_runs(stub_folder: Path) -> None:
    lock = stub_folder / "lock"
    stages = [Stage("slow", "stubs:slow", 3), Stage("quick", "stubs:quick", 30)]
    done = gpu_check.run_stages(stages, str(lock), stub_folder / "report.json")
    assert [stage.status for stage in done] == [Status.LATE, Status.DONE]
    assert done[0].findings == [Finding("early", 1.0, "s")]
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for whoever the stage left behind
    assert gpu_check.exit_status(done) == 3
    assert re.search(r"^slow .* LATE$", format_table(done), re.MULTILINE)


def test_wrong_result_and_broken_stage_are_told_and_exit_with_1(stub_folder: Path) -> None:
    stages = [Stage("wrong", "stubs:wrong", 30), Stage("broken", "stubs:broken", 30)]
    wrong, broken = gpu_check.run_stages(stages, "cpu", stub_folder / "report.json")
    assert gpu_check.exit_status([wrong]) == gpu_check.exit_status([broken]) == 1
    assert (wrong.status, broken.status) == (Status.DONE, Status.FAILED)
    table = format_table([wrong, broken])
    assert "wrong, 1 of 2 right" in table
    assert re.search(r"^  a: 1 is not 2 .*WRONG$", table, re.MULTILINE)
    assert "RuntimeError: out of memory" in table


def test_work_in_many_processes_tells_what_is_wrong_of_each(stub_folder: Path) -> None:
    report = stub_folder / "report.json"
    write_report(report, [])
    done = run_stage(Stage("shared", "stubs:shared", 60), "one", report)
    assert done.status is Status.DONE, done.error
    assert {finding.name: finding.error for finding in done.findings} == {"one": "", "two": "two is not one"}


def test_table_has_each_figure_beside_its_aim() -> None:
    findings = [
        Finding("GPU", "H200"),
        Finding("fast", 0.9, "%", at_least=0.85),
        Finding("slow", 1.4, "x", at_most=1.25),
        Finding("plain", 4000.0, "GB/s"),
    ]
    rows = [
        line.split() for line in format_table([StageReport("rates", 70, seconds=2, findings=findings)]).splitlines()
    ]
    assert rows[2:] == [
        ["GPU", "H200"],
        ["fast", "90.0%", ">=", "85.0%", "met"],
        ["slow", "1.400", "x", "<=", "1.250", "x", "MISSED"],
        ["plain", "4,000", "GB/s"],
    ]
    assert gpu_check.exit_status([StageReport("rates", 70, findings=findings)]) == 0, "slow is not wrong"


def test_report_gives_figures_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(path, [StageReport("one", 1, findings=[Finding("a", 2.5), Finding("b", "text"), Finding("c")])])
    assert read_figures(path) == {"a": 2.5}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_a_gpu_is_told_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == "This needs a GPU that torch can use, and there is none.\n"
    assert not list(tmp_path.iterdir())


def test_deadlines_of_stages_fit_ten_minutes_with_tuning() -> None:
    deadlines = sum(stage.deadline_s for stage in gpu_check.STAGES)
    assert deadlines == 330
    assert deadlines + gpu_check.TUNING.deadline_s < 600
    for stage in (*gpu_check.STAGES, gpu_check.TUNING):
        module, function = stage.target.split(":")
        assert callable(getattr(__import__(module), function))


def test_stages_are_found_where_torch_and_triton_are_all_there_is(stub_folder: Path) -> None:
    """A model of random weights needs neither numpy nor what reads weights."""
    (stub_folder / "bare.py").write_text(BARE)
    report = stub_folder / "report.json"
    write_report(report, [])
    done = run_stage(Stage("bare", "bare:run", 120), "cpu", report)
    assert done.status is Status.DONE, done.error
    num_cases, num_checks = (finding.value for finding in done.findings)
    assert num_cases == len(find_cases())
    assert num_checks == len(find_checks())


def test_kernels_are_launched_and_compared_one_by_one(stub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, in a process of its own."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (stub_folder / "interpreted.py").write_text(INTERPRETED)
    report = stub_folder / "report.json"
    write_report(report, [])
    done = run_stage(Stage("interpreted", "interpreted:run", 120), "cpu", report)
    assert done.status is Status.DONE, done.error
    errors = {finding.name: finding.error for finding in done.findings if finding.value is None}
    assert errors.pop("differs") == errors.pop("engine") == "AssertionError: 1 is not 2"
    assert len(errors) == 4
    assert set(errors.values()) == {""}


def test_small_engine_gives_the_same_tokens_however_it_runs() -> None:
    findings = list(gpu_check_engine.compare_engines("cpu", {}))
    assert len(findings) == 6
    assert [finding for finding in findings if finding.error] == []


def test_engine_whose_tokens_differ_is_told() -> None:
    alone = gpu_check_engine.Outcome({0: [1, 2], 1: [3]})
    other = gpu_check_engine.Outcome({0: [1, 2], 1: [4]})
    assert gpu_check_engine._compare("so", other, alone).error == "1 requests differ: [4] for [3]"
    assert gpu_check_engine._compare("so", alone, alone, happened=0).error


def test_steps_of_a_small_model_are_timed() -> None:
    decodes = (gpu_check_steps.Decodes(3, 40, 1.25), gpu_check_steps.Decodes(1, 30, 1.3))
    workload = gpu_check_steps.Workload(gpu_check_engine.SHAPE, torch.float32, decodes, prompt_len=100, num_steps=6)
    known = {READS: 4000.0, PRODUCTS: 700.0, gpu_check_steps.SAMPLER: 10.0}
    findings = list(gpu_check_steps.measure_steps("cpu", known, workload))
    figures = {finding.name: finding.value for finding in findings if isinstance(finding.value, float)}
    assert figures["prefill, of products"] == figures["prefill of 100"] / 700
    assert figures["sampler, of that step"] == pytest.approx(10e-6 / (figures["decode step 3 x 40"] / 1e3))
    assert 1.3 in [finding.at_most for finding in findings if finding.name.startswith("decode step 1 x 30, over")]
    assert not any(name.endswith("idle") for name in figures), "there are no graphs on a CPU"


def test_engines_that_are_started_for_their_kernels_end() -> None:
    decodes = (gpu_check_steps.Decodes(2, 40, 1.25),)
    workload = gpu_check_steps.Workload(gpu_check_engine.SHAPE, torch.float32, decodes, prompt_len=100, num_steps=6)
    gpu_check_engine.start("cpu")
    gpu_check_steps.start_one_layer("cpu", workload)
    for target in gpu_check_kernels.ENGINES.values():
        module, function = target.split(":")
        assert callable(getattr(sys.modules[module], function))


def test_workload_counts_what_llama_3_8b_is_known_for() -> None:
    workload = gpu_check_steps.WORKLOAD
    embeddings = 2 * workload.shape.vocab_size * workload.shape.hidden_size
    assert workload.product_weights + embeddings == pytest.approx(8.03e9, rel=1e-3)
    assert workload.kv_token_bytes == 131_072
    assert workload.needed_bytes < 64 * 2**30, "which a GPU of 80 GiB has"


def test_graphs_are_timed_while_the_timer_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 250.0

    replayed = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with gpu_check_steps.timed_graphs() as timer:
        for timer.is_on in (False, True, True):
            torch.cuda.CUDAGraph.replay("graph")
        assert timer.take_s() == 0.5
        assert timer.take_s() == 0
    assert replayed == ["graph"] * 3


def test_rates_are_shares_of_what_the_gpu_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(kv: torch.Tensor, num_seqs: int, context_len: int, query_len: int) -> Measured:
        seconds = (0.5 if kv.dtype.itemsize == 1 else 1.0) * (2.0 if kv.stride(0) < kv.stride(1) else 1.0)
        return Measured(seconds, kv_bytes=3_600_000_000_000, operations=500_000_000_000_000)

    bench = gpu_check_rates.bench
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "make_pool", lambda blocks, size, dtype, device: torch.zeros(2, 2).to(dtype))
    monkeypatch.setattr(bench, "measure_dense", lambda length, device, backend: 0.8)
    monkeypatch.setattr(gpu_check_rates, "_OPERATIONS", ("token_mask",))
    monkeypatch.setattr(gpu_check_rates, "_FP8_OPERATIONS", ())
    monkeypatch.setattr("kvern.kernels.ceilings.rates.median_s", lambda launch: 1.0)
    monkeypatch.setattr(gpu_check_rates.target, "architecture", lambda: 90)
    monkeypatch.setattr(gpu_check_rates, "_LEAST_POOL_BYTES", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**25, 2**25))
    known = {READS: 4000.0, COPIES: 3500.0, PRODUCTS: 700.0}
    figures = {finding.name: finding for finding in gpu_check_rates.measure_kernels("cpu", known)}
    decode = figures["decode attention 64 x 4,096, bfloat16 KV, of reads"]
    assert (decode.value, decode.at_least, decode.is_met) == (0.9, 0.85, True)
    assert figures["decode attention 64 x 4,096, fp8 KV over bfloat16"].value == 2.0
    assert figures["prefill attention 8,192, of torch's flash_attention"].value == 0.8
    assert figures["layer-major's time over block-major's, blocks of 64"].value == 2.0
    assert figures["token_mask: 64 rows"].unit == "GB/s"


def test_gpu_with_little_memory_is_told_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (24 * 2**30, 24 * 2**30))
    assert [finding.name for finding in gpu_check_rates._layouts(torch.device("cpu"), 4e12)] == ["layouts"]
    assert [finding.name for finding in gpu_check_steps.measure_steps("cuda", {})] == ["not measured"]


def test_sampler_that_steps_are_compared_with_is_among_the_rates() -> None:
    from kvern.kernels.sampling.bench import works

    names = [f"sampling: {work.name}, 64 x 128,256" for work in works(torch.device("cpu"))]
    assert gpu_check_rates.SAMPLER in names


@pytest.mark.parametrize(
    ("table", "keys", "row"),
    [
        ("_DECODE", (90, 128), configurations.DecodeConfiguration(128, 8, 3, 4)),
        ("_PREFILL", (80, 128), configurations.PrefillConfiguration(64, 32, 4, 3)),
    ],
)
def test_faster_row_replaces_the_one_in_the_table_and_nothing_else(
    table: str, keys: tuple[int, int], row, tmp_path: Path
) -> None:
    changed = tmp_path / "configurations.py"
    changed.write_text(gpu_check_tuning.with_row(Path(configurations.__file__).read_text(), table, keys, repr(row)))
    expected = {architecture: dict(rows) for architecture, rows in getattr(configurations, table).items()}
    expected[keys[0]][keys[1]] = row
    assert repr(runpy.run_path(str(changed))[table]) == repr(expected)


def test_table_without_the_row_raises_lookup_error() -> None:
    with pytest.raises(LookupError, match="103"):
        gpu_check_tuning.with_row("_T = {90: 1}", "_T", (103,), "2")


def test_sweep_writes_the_fastest_that_gains_enough(tmp_path: Path) -> None:
    source = tmp_path / "table.py"
    source.write_text("_T = {90: 3, 100: 3}  # kept\n")
    module = SimpleNamespace(choose=None)
    sweep = gpu_check_tuning.Sweep(
        name="sweep",
        module=module,
        chooser="choose",
        present=3,
        candidates=[3, 1, 4],
        measure=lambda: float(module.choose()),
        source=source,
        table="_T",
        keys=(90,),
    )
    found = list(gpu_check_tuning.run_sweep(sweep))
    assert found[0].value == 3.0
    assert source.read_text() == "_T = {90: 1, 100: 3}  # kept\n"
    assert module.choose is None
    list(gpu_check_tuning.run_sweep(replace(sweep, present=1)))
    assert source.read_text() == "_T = {90: 1, 100: 3}  # kept\n", "what is slower is not written"


def test_make_target_runs_the_script_without_an_environment() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("gpu-check:")[2].split("\n\n")[0]
    assert "bench/gpu_check.py" in recipe
    assert "set-up" not in recipe


def test_ceilings_are_told_with_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H200", total_memory=139 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name, value in (("read_bandwidth", 4e12), ("copy_bandwidth", 3.5e12), ("gemm_flops", 7e14)):
        monkeypatch.setattr(gpu_check_kernels.ceilings, name, lambda device, value=value: value)
    found = {finding.name: finding.value for finding in gpu_check_kernels.measure_ceilings("cpu", {})}
    assert (found["GPU"], found["compute capability"]) == ("H200, 139 GiB", "9.0")
    assert (found[READS], found[COPIES], found[PRODUCTS]) == (4000.0, 3500.0, 700.0)
