"""The former path of ``tokenizers.utils``."""
