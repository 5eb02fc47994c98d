"""Stage 5: the Worker protocol and those who keep it. Importing this package loads no torch."""
