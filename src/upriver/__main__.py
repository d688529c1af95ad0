"""``python -m upriver``."""

from upriver.cli import main

main(prog_name="upriver")
