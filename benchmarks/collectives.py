"""`zeroshard bench collectives` from a checkout; its settings are the same.

python benchmarks/collectives.py --worlds 2 4
"""

import sys

from zeroshard.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "collectives", *sys.argv[1:]]))
