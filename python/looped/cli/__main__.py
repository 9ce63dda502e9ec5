"""`python -m looped.cli`."""

from looped.cli import main

main()
