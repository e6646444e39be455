"""Program to program: transfers, ZeRO, recomputation, offloading and the optimizer step."""
