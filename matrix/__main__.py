"""``python -m attnmatrix.matrix``: the command line."""

from attnmatrix.matrix.cli import main

main()
