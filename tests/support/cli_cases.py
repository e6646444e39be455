"""What test_cli.py shares with other tests."""

SIZES = ("--ranks", "4", "--microbatches", "8")
