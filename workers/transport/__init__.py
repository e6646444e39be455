"""Moves data between ranks: pipeline transfers, ZeRO's collectives, rows inside layers, the gradient norm's
reduction."""
