"""Where text may be cut without a change of its tokens."""
