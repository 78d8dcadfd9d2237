"""GPT models: ``model`` has this package's own."""
