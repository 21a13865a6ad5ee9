"""What transformers finds likeliest with the same weights, in float32.

Generating takes minutes, so it was done once: `python -m tests.engine.reference MODEL.gguf` writes the file again. That
it is right is tested in one pass over each answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .prompts import PROMPTS
from .reference_tokens import FILE

NUM_TOKENS = 64


def prompt_ids(path: Path) -> list[tuple[int, ...]]:
    """Return the token ids of all prompts."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return [tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]


def load_reference_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.inference_mode()
def likeliest_tokens(model: Any, prompt: tuple[int, ...], tokens: list[int]) -> list[int]:
    """Return what is likeliest after the prompt and after each of the tokens but the last."""
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
    likeliest: list[int] = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    return likeliest


def _generate(model: Any, prompt: tuple[int, ...]) -> list[int]:
    generated = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


def main() -> None:
    path = Path(sys.argv[1])
    model = load_reference_model(path)
    model.generation_config.eos_token_id = None
    answers = [{"prompt": list(prompt), "tokens": _generate(model, prompt)} for prompt in prompt_ids(path)]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, answers)) + "\n]\n")


if __name__ == "__main__":
    main()
