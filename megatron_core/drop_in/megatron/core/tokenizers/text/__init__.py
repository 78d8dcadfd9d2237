"""The former path of the tokenizers."""
