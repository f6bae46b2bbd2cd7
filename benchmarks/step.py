"""`zeroshard bench step` from a checkout; its settings are the same.

python benchmarks/step.py --nproc 2 --shapes wide
python benchmarks/step.py --contestants ddp zero1 zero1@ring zero1@shm zero3@ring zero3@shm
"""

import sys

from zeroshard.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step", *sys.argv[1:]]))
