"""BERT, which is not supported."""
