"""`python -m kvern.services.tokenizer.template_process FD`: renders chats by templates that nobody has to trust.

Templates are programs that come with a model. transformers' sandbox keeps them from Python's insides; it does not keep
them from looping for ever or from filling the memory. So they run in processes of their own, whose limits the kernel
enforces. This one has all that they need loaded, and forks one for each connection that it is sent.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from kvern.services.tokenizer.template_wire import (
    MAX_BYTES,
    MAX_CPU_S,
    MAX_RENDERED_CHARS,
    read_frame,
    write_frame,
)


def main(control: socket.socket) -> None:
    """Fork for each connection that comes, until there is nobody to send one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        message, connections, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _limit_memory()
            serve(socket.socket(fileno=connections[0]))
            os._exit(0)
        os.close(connections[0])


def serve(connection: socket.socket) -> None:
    """Answer one chat after the other, until the connection ends. One that takes too long ends the process."""
    with connection.makefile("rb") as jobs, connection.makefile("wb") as answers:
        while (job := read_frame(jobs)) is not None:
            # Of the process' own time, so that a busy machine makes no difference. What it sends ends the process.
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            answer = _answer(job)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(answers, answer)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    variables = job.pop("variables")
    try:
        rendered, _ = render_jinja_template([job.pop("messages")], **job, **variables)
    except MemoryError:
        return {"refused": "out of memory"}
    except Exception as error:  # whatever a template raises on messages that it was not written for
        return {"refused": str(error)}
    if len(rendered[0]) > MAX_RENDERED_CHARS:
        return {"refused": f"its text has more than {MAX_RENDERED_CHARS} characters"}
    return {"rendered": rendered[0]}


def _limit_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
