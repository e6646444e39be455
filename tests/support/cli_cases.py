"""Values shared by test_cli.py and other tests."""

SIZES = ("--ranks", "4", "--microbatches", "8")
