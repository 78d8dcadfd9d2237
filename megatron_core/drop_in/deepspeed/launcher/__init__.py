"""Names of DeepSpeed's launcher; torchrun starts the ranks."""
