"""`kvern route`: where a request would go, and why."""

from __future__ import annotations

import click

from kvern.cli.options import Server, connection_options, json_option, model_option
from kvern.cli.output import print_json, stdout_console, table


@click.command()
@click.argument("text")
@connection_options
@model_option
@click.option("--session", metavar="ID", default="", help="Session that the request is of.")
@json_option
def route(text: str, server: Server, model: str | None, session: str, as_json: bool) -> None:
    """Show the replicas that could continue TEXT, the one that would be chosen first.

    Matched are the tokens of TEXT that a replica has cached. The cost is what it would compute before the answer
    begins, in tokens: the rest of TEXT, what is queued there, and something for each request that it runs.
    """
    with server.connect() as client:
        response = client.route(text, model=model or "", session_id=session)
    if as_json:
        print_json(response)
        return
    rows = table("replica", "matched#", "of#", "cost#")
    for candidate in response.candidates:
        matched, total = f"{candidate.matched_tokens:,}", f"{response.prompt_tokens:,}"
        rows.add_row(candidate.replica, matched, total, f"{candidate.cost:,.0f}")
    stdout_console().print(rows)
