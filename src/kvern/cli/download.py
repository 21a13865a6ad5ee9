"""`kvern download`: a model's files, ahead of the services that want them."""

from __future__ import annotations

import importlib.util

import click


@click.command()
@click.argument("model")
@click.option("--tokenizer-only", is_flag=True, help="Without the weights: tokenizer and detokenizer need none.")
def download(model: str, tokenizer_only: bool) -> None:
    """Fetch MODEL into the hub cache, and print where it is.

    MODEL is a hub id (owner/name); a folder, a .gguf file or smollm2 is only looked for. Services find what was fetched
    under the same HF_HOME, without a network and without the token, which HF_TOKEN gives.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise click.ClickException(
            "this needs the services (huggingface_hub is missing): pip install 'kvern[services]'"
        )
    from kvern.services.runtime.model_source import ModelNotFound, find_model

    try:
        source = find_model(model, weights=not tokenizer_only)
    except ModelNotFound as error:
        raise click.ClickException(str(error)) from error
    click.echo(source.path)
