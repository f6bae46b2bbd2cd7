"""`zeroshard bench kernels` from a checkout; its settings are the same.

python benchmarks/kernels.py --json kernels.json                 # on a GPU: the sizes of GPT-2 and LLaMA
python benchmarks/kernels.py --operations rms_norm --dtypes bfloat16
python benchmarks/kernels.py                                     # without one: toy sizes in the interpreter
"""

import sys

from zeroshard.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "kernels", *sys.argv[1:]]))
