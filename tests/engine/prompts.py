"""Prompts that differ in length, language and kind, for comparison with a reference."""

from __future__ import annotations

_TALE = """Once upon a time, in a village between two rivers, there lived a miller who owned the oldest mill in the \
land. Every morning he rose before the sun, opened the sluice and listened as the water found the wheel. The stones \
had been cut by his grandfather, and their sound told him how fine the flour would be. One spring the rivers fell \
lower than anyone could remember. The wheel turned slowly, then it did not turn at all. The farmers came with their \
sacks and went home with them full, and the bakers of the town baked no bread. """

PROMPTS = (
    "The capital of France is",
    "Q: What is 17 * 23?\nA:",
    "def fibonacci(n):\n    ",
    "import asyncio\n\n\nasync def main() -> None:\n    async with asyncio.TaskGroup() as group:\n",
    "<html>\n  <head>\n    <title>Mill</title>\n  </head>\n  <body>\n    <h1>",
    '{"name": "kvern", "version": "1.0", "tags": ["mill",',
    "Die Hauptstadt von Deutschland ist",
    "El perro corre por el parque y",
    "Bonjour, je m'appelle Marie et",
    "日本の首都は",
    "Москва является",
    "🙂🚀 Emoji are small pictures 👨‍👩‍👧‍👦 that",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Dear Sir or Madam,\n\nI am writing to you about the invoice of 3 March 2021, number 20210303-77, of 1,249.50 EUR.",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a poet.<|im_end|>\n<|im_start|>user\nWrite two lines about rain.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at a lower temperature, because",
    "   \n\n\tIndented text with   odd    spacing\n\n",
    _TALE + "So the miller",
    _TALE * 3 + "The moral of the story is",
)
