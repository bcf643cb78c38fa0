"""Train with SSPO: the same command as ``nemo-sspo train``, as a script.

python examples/train_sspo.py --config-name tiny_moe_cpu model.seed=2
torchrun --nproc-per-node 2 examples/train_sspo.py --config-name tiny_moe_cpu
"""

import sys

from nemo_sspo.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
