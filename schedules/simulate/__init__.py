"""Costs, simulated and measured timelines, and what bounds a step."""
