"""See ``build_tokenizer``."""
