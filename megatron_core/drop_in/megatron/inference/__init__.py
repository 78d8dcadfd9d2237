"""Models for generation from the arguments of a program."""
