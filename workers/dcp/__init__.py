"""Imports and exports checkpoints of torch.distributed.checkpoint."""
