"""The subcommands of `makespan`, one file each."""
