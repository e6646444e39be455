"""Turns text and conversations into a corpus: sources, chat templates, and a build in parallel that can be resumed."""
