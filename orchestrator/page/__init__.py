"""The page of a live run: what it shows, and the server in the driver that protects it."""
