"""The page of a run: its data, and the server in the driver that serves and protects it."""
