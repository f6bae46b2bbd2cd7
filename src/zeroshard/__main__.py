"""`python -m zeroshard` is the `zeroshard` command."""

import sys

from zeroshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
