from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import logging, structlog
from kvern.services.runtime.logs import configure_logs
configure_logs("tokenizer", "info", "{log_format}")
def fail(prompt):
    raise ValueError("odd")
try:
    fail("what the user " + "wrote")
except ValueError as error:
    structlog.get_logger("kvern.rpc").error("call failed", method="m", exc_info=error)
logging.getLogger("other").warning("from elsewhere")
structlog.get_logger("kvern.rpc").debug("too fine")
"""


def logged(log_format: str) -> str:
    code = CODE.format(log_format=log_format)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_json_logs_are_one_event_a_line_whoever_wrote_them() -> None:
    events = [json.loads(line) for line in logged("json").splitlines()]
    assert [(event["event"], event["level"], event["logger"], event["service"]) for event in events] == [
        ("call failed", "error", "kvern.rpc", "tokenizer"),
        ("from elsewhere", "warning", "other", "tokenizer"),
    ]
    assert events[0]["exception"][0]["exc_value"] == "odd"


@pytest.mark.parametrize("log_format", ["json", "console", "auto"])
def test_traceback_does_not_show_what_users_wrote(log_format: str) -> None:
    log = logged(log_format)
    assert "ValueError" in log
    assert "what the user wrote" not in log
