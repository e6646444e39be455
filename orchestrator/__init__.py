"""Drives: command line, config, planning, placement, the run loop. The only folder that knows actors exist."""
