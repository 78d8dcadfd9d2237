"""Names of ModelOpt, which is not supported."""
