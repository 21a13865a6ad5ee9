"""What fewer bits cost in accuracy: a model's perplexity on a text, with weights and KV rounded and without.

    python bench/accuracy.py [MODEL] [--text FILE] [--dtype bfloat16] [--json]

The text is cut into windows, and every token of a window but the first is predicted from those before it. Keys and
values go through the paged cache, so that each is read as it was rounded. A GPU is used where there is one.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from kvern.engine.config import EngineConfig
from kvern.engine.kv_cache import allocate_kv
from kvern.engine.model.loader import LoadedModel, load_model
from kvern.kernels.paged_attention import plan_attention
from kvern.services.runtime.model_source import find_model
from kvern.services.runtime.text import load_tokenizer

BLOCK_SIZE = 16
CHUNK = 256
TEXT = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"

VARIANTS: dict[str, dict[str, Any]] = {
    "as loaded": {},
    "weights to fp8": {"quantization": "fp8"},
    "KV to fp8": {"kv_cache_dtype": "fp8"},
    "weights and KV to fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}
"""What is rounded."""

CPU_VARIANTS: dict[str, dict[str, Any]] = {
    "weights to int8": {"quantization": "int8"},
    "weights to int4": {"quantization": "int4"},
}
"""What is rounded where there is no GPU."""


@dataclass(frozen=True)
class Predictions:
    """What a model says of a text: of each token that it predicts, on the CPU."""

    logprobs: Tensor
    """[num_tokens] float64, of the token that follows."""
    greedy: Tensor
    """[num_tokens], the likeliest token."""


@dataclass(frozen=True)
class Accuracy:
    """Of one variant, beside the same model as it is loaded."""

    rounded: str
    dtype: str
    num_tokens: int
    perplexity: float
    change: float
    """Of the perplexity, as a share."""
    same_greedy: float
    """Share of positions where the likeliest token is the same."""


@torch.inference_mode()
def predict(model: LoadedModel, token_ids: Tensor) -> Predictions:
    """Run one window. token_ids: [num_tokens] int64."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    kv = allocate_kv(model, BLOCK_SIZE, num_blocks)
    token_ids = token_ids.to(model.device)
    logprobs, greedy = [], []
    for start in range(0, len(token_ids), CHUNK):
        positions = torch.arange(start, min(start + CHUNK, len(token_ids)), device=model.device)
        logits = _logits(model, kv, token_ids[positions], positions)[: len(token_ids) - 1 - start]
        following = token_ids[start + 1 : start + 1 + len(logits)]
        logprobs.append(-functional.cross_entropy(logits, following, reduction="none").double().cpu())
        greedy.append(logits.argmax(dim=1).cpu())
    return Predictions(torch.cat(logprobs), torch.cat(greedy))


def _logits(model: LoadedModel, kv: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
    """Run one chunk. The only sequence's blocks lie in order, so that a token's slot is its position."""
    attention = plan_attention(
        kv,
        block_table=torch.arange(len(kv), dtype=torch.int32, device=model.device)[None],
        cu_query_lens=torch.tensor([0, len(positions)], dtype=torch.int32, device=model.device),
        context_lens=(positions[-1:] + 1).to(torch.int32),
        slot_mapping=positions,
        sliding_windows=model.config.sliding_windows,
        kv_scales=model.kv_scales,
    )
    return model.module.logits(model.module(token_ids, positions, attention, kv))


def predict_all(model: LoadedModel, token_ids: list[int], window: int) -> Predictions:
    """Run a text, window by window. A rest that is shorter than a window is left out."""
    windows = torch.tensor(token_ids).unfold(0, window, window)
    predictions = [predict(model, each) for each in windows]
    return Predictions(
        torch.cat([each.logprobs for each in predictions]), torch.cat([each.greedy for each in predictions])
    )


def measure(path: Path, token_ids: list[int], window: int, dtype: str) -> Iterator[Accuracy]:
    """Yield each variant's accuracy, the first of the model as it is loaded."""
    first: Predictions | None = None
    variants = VARIANTS if torch.cuda.is_available() else VARIANTS | CPU_VARIANTS
    for name, options in variants.items():
        model = load_model(EngineConfig(model_path=path, dtype=dtype, **options))
        predictions = predict_all(model, token_ids, window)
        first = first or predictions
        yield Accuracy(
            rounded=name,
            dtype=str(model.dtype).removeprefix("torch."),
            num_tokens=len(predictions.logprobs),
            perplexity=math.exp(-float(predictions.logprobs.mean())),
            change=math.exp(float(first.logprobs.mean() - predictions.logprobs.mean())) - 1,
            same_greedy=float((predictions.greedy == first.greedy).double().mean()),
        )


def table_of(results: list[Accuracy], title: str) -> Table:
    table = Table(title=title, box=box.MARKDOWN)
    table.add_column("rounded")
    for column in ("activations", "tokens", "perplexity", "change", "same greedy token"):
        table.add_column(column, justify="right")
    for each in results:
        table.add_row(
            each.rounded,
            each.dtype,
            f"{each.num_tokens:,}",
            f"{each.perplexity:.3f}",
            f"{each.change:+.2%}",
            f"{each.same_greedy:.1%}",
        )
    return table


@click.command()
@click.argument("model", default="smollm2")
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=TEXT, show_default=True)
@click.option("--tokens", type=click.IntRange(min=2), default=8192, show_default=True, help="Of the text, at most.")
@click.option("--window", type=click.IntRange(min=2), default=1024, show_default=True, help="Tokens of context.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), multiple=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def main(model: str, text: Path, tokens: int, window: int, dtype: tuple[str, ...], as_json: bool) -> None:
    """Measure what fewer bits cost MODEL in accuracy."""
    source = find_model(model)
    token_ids = load_tokenizer(source).encode(text.read_text(), add_special_tokens=True)[:tokens]
    if len(token_ids) < window:
        raise click.UsageError(f"{text} has {len(token_ids)} tokens, which do not fill a window of {window}")
    results = [each for name in dtype or ("auto",) for each in measure(source.path, token_ids, window, name)]
    if as_json:
        click.echo(json.dumps([asdict(each) for each in results]))
        return
    title = (
        f"{source.path.name} on {text.name}, windows of {window} tokens, {platform.processor() or platform.machine()}"
    )
    Console().print(table_of(results, title))


if __name__ == "__main__":
    main()
