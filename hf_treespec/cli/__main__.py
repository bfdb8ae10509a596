"""For launchers that start modules: `torchrun -m hf_treespec.cli train ...`."""

from hf_treespec.cli import main

main()
