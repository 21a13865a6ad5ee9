"""Writes the default model, which is a GGUF, as a Hugging Face folder in bfloat16 for servers that read only those.

python bench/peer_model.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvern.services.runtime.model_source import DEFAULT_MODEL, find_model


def write_model(folder: Path) -> None:
    """Write weights, rounded to bfloat16, and tokenizer."""
    gguf = find_model(DEFAULT_MODEL).path
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What was read is dequantized; only these two still say otherwise.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
