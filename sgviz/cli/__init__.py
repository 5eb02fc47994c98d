"""The subcommands of `sgviz`, one module each, on top of everything else."""
