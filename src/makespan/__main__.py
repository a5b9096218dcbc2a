"""`python -m makespan` is the `makespan` command."""

from makespan.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
