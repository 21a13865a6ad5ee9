from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "kv_waste.py"


def test_waste_of_one_request_is_what_its_last_block_leaves(tmp_path: Path) -> None:
    """A prompt of 24 tokens, 8 more, in blocks of 16: the KV of tokens 24 to 31 in two blocks, the last never there."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"input_length": 24, "output_length": 8}) + "\n")
    done = subprocess.run([sys.executable, BENCH, trace, "--json"], capture_output=True, text=True, check=True)
    waste = json.loads(done.stdout)
    computed = sum(range(24, 31))
    assert waste["steps"] == 8
    assert waste["unused_fraction"] == 1 - computed / (7 * 32)
