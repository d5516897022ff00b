"""One decoder family, its tokenizer, and import and export of weights."""
