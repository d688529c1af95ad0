"""The documentation, and the program that generates what can be generated of it."""
