"""Other libraries whose equivalents of some operations can be chosen: adapters to them, and what these share."""
