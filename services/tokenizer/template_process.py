"""`python -m kvern.services.tokenizer.template_process`: renders chats by templates that nobody has to trust.

Templates are programs that come with a model. transformers' sandbox keeps them from Python's insides; it does not keep
them from looping for ever or from filling the memory.
"""

from __future__ import annotations

from transformers.utils.chat_template_utils import render_jinja_template

from kvern.services.runtime.bounded_process import Message, serve
from kvern.services.tokenizer.template_limits import LIMITS, MAX_RENDERED_CHARS


def answer(job: Message) -> Message:
    """Return the text of a chat, or why its template refuses it.

    job: arguments of render_jinja_template, of which `messages` are one conversation, and `variables`.
    """
    variables = job.pop("variables")
    try:
        [rendered], _ = render_jinja_template([job.pop("messages")], **job, **variables)
        rendered.encode()  # half a surrogate pair is no text
    except MemoryError:
        return {"refused": "out of memory"}
    except Exception as error:  # whatever a template raises on messages that it was not written for
        return {"refused": str(error).encode(errors="replace").decode()}
    if len(rendered) > MAX_RENDERED_CHARS:
        return {"refused": f"its text has more than {MAX_RENDERED_CHARS} characters"}
    return {"rendered": rendered}


if __name__ == "__main__":
    serve(answer, LIMITS)
