"""Turns text and conversations into a corpus: sources, chat templates, and a parallel build that can be resumed."""
