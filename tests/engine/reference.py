"""What transformers generates from the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .prompts import PROMPTS

NUM_TOKENS = 64
_BATCH_SIZE = 8


def generate_reference(path: Path) -> dict[tuple[int, ...], list[int]]:
    """Return greedy tokens for each prompt's token ids. Prompts of like length go together, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompts = sorted((tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS), key=len)
    reference = {}
    for first in range(0, len(prompts), _BATCH_SIZE):
        batch = prompts[first : first + _BATCH_SIZE]
        padded = tokenizer.pad({"input_ids": [list(prompt) for prompt in batch]}, return_tensors="pt")
        generated = model.generate(**padded, do_sample=False, max_new_tokens=NUM_TOKENS)
        tokens = generated[:, padded["input_ids"].shape[1] :].tolist()
        reference.update(zip(batch, tokens, strict=True))
    return reference
