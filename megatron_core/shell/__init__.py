"""Reads shell scripts without running them: variables, arrays, conditions, loops, functions; no program is started."""
