"""The tokenizer service: text to token ids and back, chat templates, block digests. No torch."""
