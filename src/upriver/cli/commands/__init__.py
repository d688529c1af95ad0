"""The commands, one file each; `upriver.cli` imports a command when it runs."""
