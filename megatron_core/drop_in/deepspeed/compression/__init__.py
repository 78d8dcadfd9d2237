"""Names of compression, which is not available; ``helper`` has functions for nested modules."""

from deepspeed.compression.compress import init_compression as init_compression
from deepspeed.compression.compress import redundancy_clean as redundancy_clean
