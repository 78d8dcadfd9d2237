"""How sharded state dicts are written."""
