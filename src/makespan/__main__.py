"""`python -m makespan` is the `makespan` command."""


def main() -> int:
    """Run the command; returns the exit code. An interrupt while it is being loaded ends it in silence, too."""
    try:
        from makespan.cli import main as command

        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
