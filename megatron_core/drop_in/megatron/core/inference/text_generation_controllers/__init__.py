"""Text around an engine: tokens of prompts, and text of tokens."""
