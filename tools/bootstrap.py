"""Make the project's virtual environment, or say in one sentence why this machine cannot run Kvern.

    python3 tools/bootstrap.py run|dev

This file keeps to the syntax of Python 3.6, so that an old Python gets the sentence and not a syntax error.
"""

import os
import platform
import shutil
import sys

OLDEST_PYTHON = (3, 11)
PYTHON_NAMES = ["python3.11", "python3.12", "python3.13"]
MACHINES = {"x86_64", "aarch64"}


def why_unsupported(version, system, machine):
    """Return one sentence on what Kvern needs and this machine lacks, or None."""
    if system != "Linux" or machine not in MACHINES:
        return f"Kvern runs on Linux, on x86_64 or aarch64, and this is {system} on {machine}."
    if tuple(version[:2]) < OLDEST_PYTHON:
        return f"Kvern needs Python 3.11 or newer, and {sys.executable} is {version[0]}.{version[1]}{_advice()}"
    return None


def _advice():
    newer = [name for name in PYTHON_NAMES if shutil.which(name)]
    return f": add PYTHON={newer[0]} to the make command." if newer else "."


def main():
    reason = why_unsupported(sys.version_info, platform.system(), platform.machine())
    if reason:
        sys.exit(reason)
    import environment

    environment.ensure(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sys.argv[1])


if __name__ == "__main__":
    main()
